"""One episode of a user's Python environment: its methods called, its messages recorded."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from skyfleet.chat.message import Image, Message, Part, Text, ToolCall
from skyfleet.engines.openai_messages import parse_openai_message
from skyfleet.envs import env as protocol
from skyfleet.envs.python_tools import (
    EpisodeCalls,
    Function,
    PythonTool,
    build_tool,
    name_function,
    requested_names,
)
from skyfleet.envs.tool_turns import run_tool_calls
from skyfleet.envs.tools import ToolError
from skyfleet.envs.validation import parse_grade
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending, Trajectory, Turn

REWARD_ARGUMENTS = ("task", "state", "answer", "messages", "trajectory")
"""What a reward function or `grade` may take, by name."""

MessageLike = str | Message | Mapping[str, Any]


def as_messages(given: MessageLike | Sequence[MessageLike]) -> tuple[Message, ...]:
    """Messages from a text, a Message, a mapping as in OpenAI's API, or several of them."""
    if isinstance(given, str):
        return (Message(role="user", content=given),)
    if isinstance(given, Message):
        return (given,)
    if isinstance(given, Mapping):
        return (_parse_message(given),)
    if isinstance(given, Sequence):
        return tuple(message for one in given for message in as_messages(one))
    raise EnvError(f"{given!r:.100} is not a message; use a text, sf.Message or a list of them")


def _parse_message(given: Mapping[str, Any]) -> Message:
    role, content = given.get("role", "user"), _parse_content(given.get("content"))
    match role:
        case "assistant":
            text = {**given, "content": content if isinstance(content, str) else None}
            parsed = parse_openai_message(text, splits=False)
            return parsed if isinstance(content, str) else replace(parsed, content=content)
        case "tool":
            is_error = bool(given.get("is_error", False))
            call_id = given.get("tool_call_id")
            return Message(role="tool", content=content, tool_call_id=call_id, is_error=is_error)
        case "developer":
            return Message(role="system", content=content)
        case "system" | "user":
            return Message(role=role, content=content)
    raise EnvError(f"a message has the role {role!r:.40}; use system, user, assistant or tool")


def _parse_content(content: object) -> str | tuple[Part, ...]:
    """Text, or the parts of a message with images."""
    if not isinstance(content, list | tuple):
        return "" if content is None else str(content)
    parts = tuple(map(_parse_part, content))
    if any(isinstance(part, Image) for part in parts):
        return parts
    return "".join(part.text for part in parts if isinstance(part, Text))


def _parse_part(part: object) -> Part:
    match part:
        case str():
            return Text(part)
        case Text() | Image():
            return part
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("data:"):
            header, _, data = url.removeprefix("data:").partition(",")
            try:
                return Image(b64decode(data, validate=True), header.partition(";")[0])
            except ValueError as error:
                raise EnvError(f"an image_url is not base64: {error}") from None
    raise EnvError(
        f"{part!r:.100} is not a part of a message; use a text part, or an image_url part with a "
        "data: URL"
    )


def prompt_messages(task: Task) -> tuple[Message, ...]:
    """The task's prompt, which may be a chat of several messages."""
    return as_messages(task.chat)


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Observation(protocol.Observation):
    """The prompt and the tools that an episode starts with.

    `messages` is a text, a `Message`, or a list of them; `tools` are functions or methods.

    >>> import skyfleet as sf
    >>> def look(state) -> str:
    ...     "Look around."
    ...     return "a safe"
    >>> observation = sf.Observation("Open the safe.", tools=[look])
    >>> observation.messages[0].text, observation.tools[0].name
    ('Open the safe.', 'look')
    """

    functions: tuple[PythonTool, ...]

    def __init__(
        self,
        messages: MessageLike | Sequence[MessageLike],
        tools: Sequence[Function | PythonTool] = (),
        **others: Any,
    ) -> None:
        functions = tuple(build_tool(function) for function in tools)
        specs = tuple(function.spec for function in functions)
        _copy_fields(
            self, protocol.Observation(messages=as_messages(messages), tools=specs, **others)
        )
        object.__setattr__(self, "functions", functions)


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Step(protocol.Step):
    """The environment's answer to one message of the agent.

    >>> import skyfleet as sf
    >>> step = sf.Step("The dial clicks.", reward=0.1, done=False, info={"clicks": 1})
    >>> step.messages[0].text, step.reward
    ('The dial clicks.', 0.1)
    """

    def __init__(self, messages: MessageLike | Sequence[MessageLike] = (), **others: Any) -> None:
        _copy_fields(self, protocol.Step(messages=as_messages(messages), **others))


def _copy_fields(target: object, source: protocol.Observation | protocol.Step) -> None:
    for field in fields(source):
        object.__setattr__(target, field.name, getattr(source, field.name))


def _plain(observation: protocol.Observation) -> protocol.Observation:
    known = fields(protocol.Observation)
    return protocol.Observation(**{field.name: getattr(observation, field.name) for field in known})


class PythonEpisode:
    """Runs a user's environment as an Env: awaits or threads its methods, records the episode."""

    def __init__(
        self,
        task: Task,
        calls: EpisodeCalls,
        *,
        reset: Function,
        step: Function | None = None,
        grade: Function | None = None,
        close: Function | None = None,
        read_state: Callable[[], object] = lambda: None,
    ) -> None:
        """`read_state` is called whenever a tool or the grade asks for the state."""
        self._task, self._calls, self._read_state = task, calls, read_state
        self._reset, self._step, self._grade, self._close = reset, step, grade, close
        self._tools: dict[str, PythonTool] = {}
        self._prompt: tuple[Message, ...] = ()
        self._turns: list[Turn] = []
        self._steps: list[protocol.Step] = []
        self._ending = Ending.MAX_TURNS

    @property
    def task_prompt(self) -> tuple[Message, ...]:
        return prompt_messages(self._task)

    async def reset(self) -> protocol.Observation:
        given = await call_by_name(self._calls, self._reset, task=self._task)
        observation = given if isinstance(given, protocol.Observation) else Observation(given)
        self._prompt, self._turns, self._steps = observation.messages, [], []
        return self._use_tools(observation)

    async def step(self, action: Message) -> protocol.Step:
        if self._step is None:
            step = await self.call_tools(action)
        else:
            step = _as_step(await self._calls.call(self._step, action))
            if step.opening is not None:
                step = replace(step, opening=self._use_tools(step.opening))
        self._steps.append(step)
        self._turns.append(
            Turn(action=action, replies=step.messages, reward=step.reward, engine_seconds=0.0)
        )
        if step.done:
            self._ending = Ending.DONE
        return step

    async def call_tools(self, action: Message) -> protocol.Step:
        """Answer the tool calls of a message; without one the episode is done."""
        if not action.tool_calls and not action.malformed_calls:
            return protocol.Step(done=True)
        return await run_tool_calls(action, self._answer)

    async def grade(self) -> Grade | None:
        """The user's grade, or without one the sum of the step rewards."""
        if self._grade is None:
            return protocol.sum_step_rewards(self._steps)
        name = name_function(self._grade)
        names = requested_names(self._grade, REWARD_ARGUMENTS, where=name)
        values = self._reward_values(names)
        return parse_grade(await self._calls.call(self._grade, **values), by=name)

    async def close(self) -> None:
        self._calls.interrupt()
        try:
            if self._close is not None:
                await self._calls.call(self._close)
        finally:
            self._calls.end()

    def _use_tools(self, observation: protocol.Observation) -> protocol.Observation:
        """Call the observation's functions from now on; the agent gets their schemas."""
        if isinstance(observation, Observation):
            self._tools = {function.spec.name: function for function in observation.functions}
        return _plain(observation)

    async def _answer(self, call: ToolCall) -> protocol.Step:
        try:
            if call.name not in self._tools:
                raise ToolError(f"no tool {call.name!r}; choose from {', '.join(self._tools)}")
            tool = self._tools[call.name]
            values: dict[str, object] = {"task": self._task}
            if "state" in tool.injected:
                values["state"] = self._read_state()
            text = await tool.call(call.arguments, self._calls, values)
            is_error = False
        except ToolError as error:
            text, is_error = f"Error: {error}", True
        reply = Message(role="tool", content=text, tool_call_id=call.id, is_error=is_error)
        return protocol.Step(messages=(reply,))

    def _reward_values(self, names: Collection[str]) -> dict[str, Any]:
        trajectory = self._build_trajectory()
        read: dict[str, Callable[[], Any]] = {
            "task": lambda: self._task,
            "state": self._read_state,
            "answer": lambda: self._turns[-1].action.text if self._turns else "",
            "messages": lambda: list(trajectory.messages),
            "trajectory": lambda: trajectory,
        }
        return {name: read[name]() for name in names}

    def _build_trajectory(self) -> Trajectory:
        """The episode so far; tokens, times and the grade are not known to an environment."""
        return Trajectory(
            task_key=self._task.key,
            env_key=self._task.env_key,
            sample=0,
            prompt=self._prompt,
            turns=tuple(self._turns),
            transcripts=(),
            ending=protocol.episode_ending.get() or self._ending,
            grade=None,
        )


def _as_step(given: object) -> protocol.Step:
    if isinstance(given, protocol.Step):
        return given
    if isinstance(given, str | Message):
        return Step(given)
    raise EnvError(f"step() returned {given!r:.100}; return sf.Step(...) or a text")


async def call_by_name(calls: EpisodeCalls, function: Function, **values: Any) -> Any:
    names = requested_names(function, tuple(values), where=name_function(function))
    return await calls.call(function, **{name: values[name] for name in names})
