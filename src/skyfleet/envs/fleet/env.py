"""FleetEnv: one episode of one task in an instance that Fleet, or a server like it, provides."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from datetime import date
from typing import Any

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.envs.content_blocks import content_of
from skyfleet.envs.env import DONE, EnvFactory, Observation, Step
from skyfleet.envs.fleet.grading import judge
from skyfleet.envs.fleet.mcp_tools import McpTools
from skyfleet.envs.fleet.service import FleetService, RemoteInstance, RunnerToken
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.envs.turns import SUBMIT, SUBMIT_NAME, take_turn
from skyfleet.errors import EnvError, EpisodeError, VerifierError
from skyfleet.tasks.task import Grade, Task

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

_MANNERS = f"""\
If a tool answers with an error, read it and do not repeat the same call: change the arguments, \
use another tool, or take smaller steps.

End every turn with either a tool call or {DONE}. State your answer, where one is asked for, \
before {DONE}. Nobody answers questions, so do not ask any or offer more help."""


def opening_messages(task: Task, *, today: date) -> tuple[Message, Message]:
    """`today` counts only where the task has no CURRENT_DATE: the env's clock is the right one."""
    variables = dict(task.env_variables)
    current_date = str(variables.pop("CURRENT_DATE", None) or today.isoformat())
    sections = [
        "You work in a software environment through tools. Do the task by calling them.",
        f"Today is {current_date}. A date without a year is in this year or a coming one.",
        _context(variables),
        _HINTS.get(task.env_key, ""),
        _SCREEN if task.modality != "tool_use" else "",
        _MANNERS,
    ]
    system = "\n\n".join(section for section in sections if section)
    return Message(role="system", content=system), Message(role="user", content=task.prompt)


def _context(variables: dict[str, Any]) -> str:
    known = [f"- {name}: {variables.pop(key)}" for key, name in _NAMED.items() if key in variables]
    others = [f"- {key}: {value}" for key, value in variables.items()]
    return "\n".join(["The environment:", *known, *others]) if known or others else ""


logger = logging.getLogger(__name__)

_COMPUTER = "computer"
_CREATION_GRACE_SECONDS = 20
"""How long a close waits for an instance that is still being made, so as to delete it."""
_closing: set[asyncio.Task[None]] = set()
"""Kept here, because the event loop forgets a task that nobody holds."""


def fleet_factory(settings: FleetSettings) -> EnvFactory:
    """An env a task, in an instance of its own."""
    token = RunnerToken()

    async def open_fleet(task: Task) -> FleetEnv:
        return FleetEnv(FleetService(settings, token), task)

    return open_fleet


@dataclass(slots=True, kw_only=True)
class _Episode:
    """What has been opened and said since the last reset."""

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
        # A task of its own: if this episode is cut while Fleet makes the instance, close waits
        # for it and deletes it, where a cancelled request would leave it running.
        self._provisioning = asyncio.create_task(self._service.provision(self._task))
        instance = await asyncio.shield(self._provisioning)
        await self._service.reset(instance)
        remote = McpTools(self._service, self._endpoints(instance))
        tools = self._offered(await remote.offered())
        messages = opening_messages(self._task, today=date.today())
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

        step = await take_turn(action, answer)
        episode.done = step.done
        episode.conversation += [action, *step.messages]
        return step

    async def grade(self) -> Grade:
        if self._episode is None:
            raise VerifierError(f"task {self._task.key}: nothing was opened, so nothing to grade")
        return await judge(
            self._service,
            self._episode.instance,
            self._task,
            final_answer=self._episode.answer,
            conversation=self._episode.conversation,
        )

    async def close(self) -> None:
        """Deletes the instance, even where whoever closes is cancelled meanwhile."""
        self._episode = None
        if self._provisioning is not None:
            provisioning, self._provisioning = self._provisioning, None
            closing = asyncio.create_task(self._give_back(provisioning))
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)
            await asyncio.shield(closing)

    async def _give_back(self, provisioning: asyncio.Task[RemoteInstance]) -> None:
        try:
            async with asyncio.timeout(_CREATION_GRACE_SECONDS):
                instance = await provisioning
        except TimeoutError:
            logger.warning("task %s: closed while Fleet made its instance", self._task.key)
        except EpisodeError:
            pass  # no instance was made, and reset has said so
        else:
            await self._service.delete(instance)
        finally:
            await self._service.close()

    def _endpoints(self, instance: RemoteInstance) -> tuple[str, ...]:
        aggregator = f"{instance.root}api/v1/mcp"
        return (
            (f"{instance.root}mcp", aggregator)
            if self._task.modality == "tool_use"
            else (aggregator,)
        )

    def _offered(self, specs: tuple[ToolSpec, ...]) -> dict[str, ToolSpec]:
        """A screen is worked by the computer tool alone; tool use has every other."""
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

    async def _answer(self, episode: _Episode, call: ToolCall) -> Step:
        if call.name not in episode.tools:
            return _told(call, f"no tool {call.name!r:.60}; tools: {', '.join(episode.tools)}")
        if call.name == SUBMIT_NAME:
            return _submitted(episode, call)
        result = await episode.remote.call(call.name, call.arguments)
        limit = self._service.settings.max_result_characters
        content = content_of(
            [_with_picture(block) for block in result.get("content", ())], max_characters=limit
        )
        if result.get("isError") and isinstance(content, str):
            return _told(call, content)
        reply = Message(role="tool", content=content or "ok", tool_call_id=call.id)
        return Step(messages=(reply,))


def _submitted(episode: _Episode, call: ToolCall) -> Step:
    answer = call.arguments.get("answer")
    if not isinstance(answer, str):
        return _told(call, f"{SUBMIT_NAME} takes answer, a text")
    episode.answer = answer
    reply = Message(role="tool", content=answer or '""', tool_call_id=call.id)
    return Step(messages=(reply,), done=True)


def _told(call: ToolCall, problem: str) -> Step:
    reply = Message(role="tool", content=f"Error: {problem}", tool_call_id=call.id, is_error=True)
    return Step(messages=(reply,))


def _with_picture(block: dict[str, Any]) -> dict[str, Any]:
    """Fleet's computer tool may wrap its screenshot in the JSON of a text."""
    try:
        url = json.loads(block["text"])["base64_image"]
    except (KeyError, TypeError, ValueError):
        return block
    if not isinstance(url, str):
        return block
    head, _, data = url.rpartition(",")
    media_type = head.removeprefix("data:").partition(";")[0] or "image/png"
    return {"type": "image", "data": data, "mimeType": media_type}
