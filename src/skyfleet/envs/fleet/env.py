"""FleetEnv: one episode of one task in an instance of Fleet or a compatible server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from skyfleet.chat.message import Message, Part, ToolCall, ToolSpec
from skyfleet.config.root import RunConfig
from skyfleet.envs.content_blocks import parse_content_blocks, to_text
from skyfleet.envs.env import DONE, EnvFactory, Observation, Step
from skyfleet.envs.fleet.grading import grade_on_fleet
from skyfleet.envs.fleet.mcp_tools import McpTools
from skyfleet.envs.fleet.replies import (
    add_screenshot,
    confirm_answer,
    make_error,
    make_reply,
    read_image_url,
    reject_answer,
    reject_unknown,
)
from skyfleet.envs.fleet.service import FleetService, RemoteInstance, RunnerToken
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.envs.tool_turns import SUBMIT, SUBMIT_NAME, run_tool_calls
from skyfleet.errors import EnvError, EpisodeError, VerifierError
from skyfleet.tasks.task import Grade, Task

logger = logging.getLogger(__name__)

_COMPUTER = "computer"
_CREATION_GRACE_SECONDS = 20
"""How long a close waits for an instance that is still being created, in order to delete it."""
_closing: set[asyncio.Task[None]] = set()
"""Strong references, because the event loop keeps only weak ones to its tasks."""

_NAMED = {"LOGGED_IN_USER": "Your user id", "LOGGED_IN_NAME": "Your name"}
_HINTS = {
    "fostgres": "Look up tables and columns in information_schema before you query them.",
}
_SCREEN = f"""\
The screen:
- Do one thing, look at the screenshot, then choose the next.
- After a page change, wait once.
- What failed twice will fail again: try another way.
- Say {DONE} when the task is finished."""

_RULES = f"""\
If a tool answers with an error, read it and do not repeat the same call: change the arguments, \
use another tool, or take smaller steps.

End every turn with either a tool call or {DONE}. State your answer, where one is asked for, \
before {DONE}. Nobody answers questions, so do not ask any or offer more help."""


def make_prompt(task: Task, *, today: date) -> tuple[Message, Message]:
    """Return the system and user message; the task's CURRENT_DATE takes precedence over `today`."""
    variables = dict(task.env_variables)
    current_date = str(variables.pop("CURRENT_DATE", None) or today.isoformat())
    sections = [
        "You work in a software environment through tools. Do the task by calling them.",
        f"Today is {current_date}. A date without a year is in this year or a coming one.",
        _format_variables(variables),
        _HINTS.get(task.env_key, ""),
        _SCREEN if task.modality != "tool_use" else "",
        _RULES,
    ]
    system = "\n\n".join(section for section in sections if section)
    return Message(role="system", content=system), Message(role="user", content=task.prompt)


def _format_variables(variables: dict[str, Any]) -> str:
    known = [f"- {name}: {variables.pop(key)}" for key, name in _NAMED.items() if key in variables]
    others = [f"- {key}: {value}" for key, value in variables.items()]
    return "\n".join(["The environment:", *known, *others]) if known or others else ""


def build_factory(config: RunConfig) -> EnvFactory:
    return fleet_factory(
        FleetSettings.from_config(
            config.environment.skyrl_gym.fleet_task,
            trajectory_timeout_seconds=config.generator.trajectory_timeout_seconds,
        )
    )


def fleet_factory(settings: FleetSettings) -> Callable[[Task], Awaitable[FleetEnv]]:
    """Open one environment per task, in an instance of its own."""
    token = RunnerToken()

    async def open_fleet(task: Task) -> FleetEnv:
        return FleetEnv(FleetService(settings, token), task)

    return open_fleet


@dataclass(slots=True, kw_only=True)
class _Episode:
    """The state since the last reset."""

    instance: RemoteInstance
    remote: McpTools
    tools: dict[str, ToolSpec]
    conversation: list[Message]
    answer: str | None = None
    done: bool = False


class FleetEnv:
    def __init__(self, service: FleetService, task: Task) -> None:
        self._service, self._task = service, task
        self._provisioning: asyncio.Task[RemoteInstance] | None = None
        self._episode: _Episode | None = None

    async def reset(self) -> Observation:
        await self.close()
        self._service.open()
        # A separate task: if the episode is cancelled while Fleet creates the instance, close waits
        # for the instance and deletes it; a cancelled request would leave it running.
        self._provisioning = asyncio.create_task(self._service.provision(self._task))
        instance = await asyncio.shield(self._provisioning)
        await self._service.reset(instance)
        remote = McpTools(self._service, self._list_endpoints(instance))
        tools = self._select_tools(await remote.list_tools())
        system, user = make_prompt(self._task, today=date.today())
        if _COMPUTER in tools:
            user = add_screenshot(user, await self._take_screenshot(remote))
        messages = system, user
        self._episode = _Episode(
            instance=instance, remote=remote, tools=tools, conversation=list(messages)
        )
        return Observation(messages=messages, tools=tuple(tools.values()))

    async def step(self, action: Message) -> Step:
        episode = self._episode
        if episode is None:
            raise EnvError(f"task {self._task.key}: the env is not open; call reset first")
        if episode.done:
            raise EnvError(f"task {self._task.key}: step after done; open another env")

        async def answer(call: ToolCall) -> Step:
            return await self._answer(episode, call)

        step = await run_tool_calls(action, answer)
        episode.done = step.done
        episode.conversation += [action, *step.messages]
        return step

    async def grade(self) -> Grade:
        if self._episode is None:
            raise VerifierError(f"task {self._task.key}: the env is not open; call reset first")
        return await grade_on_fleet(
            self._service,
            self._episode.instance,
            self._task,
            final_answer=self._episode.answer,
            conversation=self._episode.conversation,
        )

    async def close(self) -> None:
        """Delete the instance, even if the caller is cancelled meanwhile."""
        self._episode = None
        if self._provisioning is not None:
            provisioning, self._provisioning = self._provisioning, None
            closing = asyncio.create_task(self._release(provisioning))
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)
            await asyncio.shield(closing)

    async def _release(self, provisioning: asyncio.Task[RemoteInstance]) -> None:
        try:
            async with asyncio.timeout(_CREATION_GRACE_SECONDS):
                instance = await provisioning
        except TimeoutError:
            logger.warning("task %s: closed while Fleet created its instance", self._task.key)
        except EpisodeError:
            pass  # no instance was created, and reset has reported it
        else:
            await self._service.delete(instance)
        finally:
            await self._service.close()

    def _list_endpoints(self, instance: RemoteInstance) -> tuple[str, ...]:
        aggregator = f"{instance.root}api/v1/mcp"
        return (
            (f"{instance.root}mcp", aggregator)
            if self._task.modality == "tool_use"
            else (aggregator,)
        )

    def _select_tools(self, specs: tuple[ToolSpec, ...]) -> dict[str, ToolSpec]:
        """Offer only the computer tool for screen tasks, and all other tools for tool use."""
        on_screen = self._task.modality != "tool_use"
        tools = {spec.name: spec for spec in specs if (spec.name == _COMPUTER) == on_screen}
        if not tools:
            raise EnvError(
                f"task {self._task.key}: modality={self._task.modality} leaves none of the tools "
                f"{[spec.name for spec in specs]}; correct the task's modality"
            )
        if SUBMIT_NAME in self._task.prompt:
            tools[SUBMIT_NAME] = SUBMIT
        return tools

    async def _take_screenshot(self, remote: McpTools) -> str | tuple[Part, ...]:
        """Return the screen that the task starts with; empty if there is none yet."""
        try:
            result = await remote.call(_COMPUTER, {"action": "screenshot"})
            return self._parse_result(result)
        except EnvError as error:
            logger.warning("task %s starts without a screenshot: %s", self._task.key, error)
            return ""

    def _parse_result(self, result: Mapping[str, Any]) -> str | tuple[Part, ...]:
        limit = self._service.settings.max_result_characters
        blocks = [_unwrap_image(block) for block in result.get("content") or ()]
        if not blocks and (structured := result.get("structuredContent")) is not None:
            return to_text(structured, max_characters=limit)
        return parse_content_blocks(blocks, max_characters=limit)

    async def _answer(self, episode: _Episode, call: ToolCall) -> Step:
        if call.name not in episode.tools:
            return reject_unknown(call, episode.tools)
        if call.name == SUBMIT_NAME:
            return _submit(episode, call)
        result = await episode.remote.call(call.name, call.arguments)
        content = self._parse_result(result)
        if result.get("isError") and isinstance(content, str):
            return make_error(call, content)
        return make_reply(call, content)


def _submit(episode: _Episode, call: ToolCall) -> Step:
    answer = call.arguments.get("answer")
    if not isinstance(answer, str):
        return reject_answer(call)
    episode.answer = answer
    return confirm_answer(call)


def _unwrap_image(block: dict[str, Any]) -> dict[str, Any]:
    """Fleet's computer tool may wrap its screenshot in the JSON of a text block."""
    try:
        url = json.loads(block["text"])["base64_image"]
    except (KeyError, TypeError, ValueError):
        return block
    return read_image_url(url) if isinstance(url, str) else block
