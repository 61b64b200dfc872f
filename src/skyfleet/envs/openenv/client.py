"""OpenEnvEnv: adapter for any OpenEnv server, over the WebSocket session that holds its state.

A task's `metadata["reset"]` holds keywords for the server's reset, next to `task_key` and a `seed`
that is the same for all attempts at a task. The reward of the last observation is the grade. A
tool named `done` without required arguments is hidden from the agent and called at the end. For a
server whose actions are not tool calls the agent gets one tool, `step`, that takes an action.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from zlib import crc32

import httpx
from pydantic import BaseModel, Field, ValidationError

from skyfleet.chat.message import Message, Part, ToolCall, ToolSpec
from skyfleet.config.root import RunConfig
from skyfleet.envs.content_blocks import parse_content_blocks, to_text
from skyfleet.envs.env import EnvFactory, Observation, Step
from skyfleet.envs.openenv.session import ActionRejectedError, OpenEnvSettings, Session, StepResult
from skyfleet.envs.tls import tls_context
from skyfleet.envs.tool_turns import SYSTEM, run_tool_calls
from skyfleet.envs.verifiers.run_verifier import SUCCESS_REWARD
from skyfleet.errors import EnvError, VerifierError
from skyfleet.tasks.task import Grade, Task

END_TOOL = "done"


class _Tool(BaseModel):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=dict)


class _Tools(BaseModel):
    tools: list[_Tool]


class _Schemas(BaseModel):
    action: dict[str, Any]


def build_factory(config: RunConfig) -> EnvFactory:
    return openenv_factory(OpenEnvSettings.from_config(config.environment.openenv))


def openenv_factory(settings: OpenEnvSettings) -> Callable[[Task], Awaitable[OpenEnvEnv]]:
    actions = _ActionSchema(settings)

    async def open_env(task: Task) -> OpenEnvEnv:
        return OpenEnvEnv(task, settings, actions)

    return open_env


class OpenEnvEnv:
    def __init__(self, task: Task, settings: OpenEnvSettings, actions: _ActionSchema) -> None:
        self._task, self._settings, self._actions = task, settings, actions
        self._session = Session(settings)
        self._last = StepResult(observation={})
        self._takes_tool_calls = self._has_end_tool = False

    async def reset(self) -> Observation:
        await self.close()
        keywords = {"task_key": self._task.key, "seed": crc32(self._task.key.encode()) >> 1}
        self._last = await self._session.open(keywords | self._task.metadata.get("reset", {}))
        metadata = self._last.metadata
        messages = (
            Message(role="system", content=str(metadata.get("system_prompt") or SYSTEM)),
            Message(role="user", content=str(metadata.get("prompt") or self._task.prompt)),
        )
        return Observation(messages=messages, tools=await self._list_tools())

    async def step(self, action: Message) -> Step:
        return await run_tool_calls(action, self._answer)

    async def grade(self) -> Grade | None:
        if not self._last.done and not self._session.is_open:
            url = self._settings.base_url
            raise VerifierError(
                f"{url}: the session ended before the episode; the reward is unknown"
            )
        if self._has_end_tool and not self._last.done:
            try:
                end = {"type": "call_tool", "tool_name": END_TOOL}
                self._last = await self._session.ask("step", end)
            except EnvError as error:
                raise VerifierError(str(error)) from error
        reward, metadata = self._last.reward, self._last.metadata
        if reward is None and "grade_error" in metadata:
            raise VerifierError(str(metadata["grade_error"]))
        if reward is None:
            return None
        return Grade(
            reward=reward,
            success=reward >= SUCCESS_REWARD,
            explanation=str(metadata.get("explanation", "")),
        )

    async def close(self) -> None:
        await self._session.close()

    async def _list_tools(self) -> tuple[ToolSpec, ...]:
        schema = await self._actions.get()
        self._takes_tool_calls = _is_tool_call(schema)
        if not self._takes_tool_calls:
            return (_make_step_tool(schema),)
        listed = await self._session.ask("step", {"type": "list_tools"})
        try:
            tools = _Tools.model_validate(listed.observation).tools
        except ValidationError as error:
            raise EnvError(f"{self._settings.base_url}: list_tools returned no tools") from error
        self._has_end_tool = any(map(_is_end_tool, tools))
        return tuple(
            ToolSpec(name=tool.name, description=tool.description, parameters=tool.input_schema)
            for tool in tools
            if not _is_end_tool(tool)
        )

    async def _answer(self, call: ToolCall) -> Step:
        action = dict(call.arguments)
        if self._takes_tool_calls:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": action}
        content: str | tuple[Part, ...]
        try:
            self._last = result = await self._session.ask("step", action)
            content, is_error = self._format(result.observation)
        except ActionRejectedError as error:
            limit = self._settings.max_result_characters
            content, is_error = to_text(f"Error: {error}", max_characters=limit), True
            result = StepResult(observation={})
        reply = Message(role="tool", content=content, tool_call_id=call.id, is_error=is_error)
        return Step(messages=(reply,), done=result.done, reward=result.reward or 0.0)

    def _format(self, observation: Mapping[str, Any]) -> tuple[str | tuple[Part, ...], bool]:
        """Return what the agent reads, and whether it is an error."""
        limit = self._settings.max_result_characters
        if not self._takes_tool_calls:
            shown = {name: value for name, value in observation.items() if name != "metadata"}
            return to_text(shown, max_characters=limit), False
        result, error = observation.get("result"), observation.get("error")
        if isinstance(error, dict):
            return to_text(error.get("message", error), max_characters=limit), True
        if isinstance(result, dict) and isinstance(result.get("content"), list):
            content = parse_content_blocks(result["content"], max_characters=limit)
            return content, bool(result.get("is_error"))
        return to_text(result, max_characters=limit), False


class _ActionSchema:
    """The JSON schema of the server's actions, fetched once rather than per episode."""

    def __init__(self, settings: OpenEnvSettings) -> None:
        self._settings = settings
        self._schema: Mapping[str, Any] | None = None

    async def get(self) -> Mapping[str, Any]:
        if self._schema is None:
            url, seconds = self._settings.url("/schema"), self._settings.connect_timeout_seconds
            try:
                async with httpx.AsyncClient(verify=tls_context(), timeout=seconds) as http:
                    answer = await http.get(url, headers=dict(self._settings.headers))
                    answer.raise_for_status()
                self._schema = _Schemas.model_validate_json(answer.content).action
            except (httpx.HTTPError, ValidationError) as error:
                raise EnvError(f"{url}: {type(error).__name__}: {error}") from error
        return self._schema


def _is_tool_call(schema: Mapping[str, Any]) -> bool:
    """Whether an action is a tool call; an empty schema means that it is."""
    properties = schema.get("properties", {})
    kind = properties.get("type", {}).get("const")
    return kind in ("call_tool", "list_tools") or properties.keys() <= {"metadata"}


def _make_step_tool(schema: Mapping[str, Any]) -> ToolSpec:
    parameters = {
        name: part for name, part in schema.items() if name not in ("title", "description")
    }
    properties = schema.get("properties", {})
    parameters["properties"] = {n: part for n, part in properties.items() if n != "metadata"}
    description = str(schema.get("description", "Act in the environment."))
    return ToolSpec(name="step", description=description, parameters=parameters)


def _is_end_tool(tool: _Tool) -> bool:
    return tool.name == END_TOOL and not tool.input_schema.get("required")
