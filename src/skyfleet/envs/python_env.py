"""Environments in plain Python: `ToolEnv` from functions, `Env` subclasses, and their adapter."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs import env as protocol
from skyfleet.envs.python_tools import (
    EpisodeCalls,
    Function,
    PythonTool,
    build_tool,
    name_function,
    requested_names,
    view_task,
)
from skyfleet.envs.tools import ToolError
from skyfleet.envs.turns import take_turn
from skyfleet.envs.validation import grade_from
from skyfleet.errors import ConfigError, EnvError
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending, Trajectory, Turn

REWARD_ARGUMENTS = ("task", "state", "answer", "messages", "trajectory")
"""What a reward function or `grade` may take, by name."""

MessageLike = str | Message | Mapping[str, Any]


def as_messages(given: MessageLike | Sequence[MessageLike]) -> tuple[Message, ...]:
    """Messages from a text, a Message, a {"role", "content"} mapping, or several of them."""
    if isinstance(given, str):
        return (Message(role="user", content=given),)
    if isinstance(given, Message):
        return (given,)
    if isinstance(given, Mapping):
        return (Message(role=given.get("role", "user"), content=str(given.get("content") or "")),)
    if isinstance(given, Sequence):
        return tuple(message for one in given for message in as_messages(one))
    raise EnvError(f"{given!r:.100} is not a message; use a text, sf.Message or a list of them")


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
        tools: Sequence[Function] = (),
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
        if isinstance(others.get("opening"), Observation):
            others["opening"] = _plain(others["opening"])
        _copy_fields(self, protocol.Step(messages=as_messages(messages), **others))


def _copy_fields(target: object, source: protocol.Observation | protocol.Step) -> None:
    for field in fields(source):
        object.__setattr__(target, field.name, getattr(source, field.name))


def _plain(observation: protocol.Observation) -> protocol.Observation:
    known = fields(protocol.Observation)
    return protocol.Observation(**{field.name: getattr(observation, field.name) for field in known})


class Env:
    """An environment as a class: one instance per episode, with sync or async methods.

    `__init__` may take the task. `reset` returns an `Observation` with the prompt and the tools;
    without it the prompt is the task's. `step` calls the tools; override it only if that is not
    enough. A message without a tool call ends the episode. `grade()` returns a reward, a `Grade` or
    None, and may take task, answer, messages or trajectory; without it the episode earns the sum of
    its step rewards. `close()` releases what the episode holds.

    >>> import skyfleet as sf
    >>> class Safe(sf.Env):
    ...     def __init__(self, task):
    ...         self.secret, self.open = task["secret"], False
    ...     def reset(self):
    ...         return sf.Observation("Open the safe.", tools=[self.turn_dial])
    ...     def turn_dial(self, number: int) -> str:
    ...         "Turn the dial."
    ...         self.open = number == self.secret
    ...         return "open" if self.open else "closed"
    ...     def grade(self):
    ...         return float(self.open)
    >>> trajectory = sf.rollout("null", Safe, {"prompt": "Open it.", "secret": 7})
    >>> trajectory.reward
    0.0
    """

    _episode: PythonEnv | None = None

    def reset(self) -> Any:
        """Return the task's prompt, without tools."""
        return self._running().task_prompt

    async def step(self, message: Message) -> Any:
        """Call the tools of the observation; a message without a tool call ends the episode."""
        return await self._running().call_tools(message)

    def _running(self) -> PythonEnv:
        if self._episode is None:
            raise EnvError(
                f"{type(self).__name__} runs in an episode: sf.rollout(model, env, task)"
            )
        return self._episode


class ToolEnv:
    """An environment from functions: tools, one state per episode, and a reward.

    `setup(task)` makes the episode's state, which tools get as `state`. `reward` may take task,
    state, answer, messages and trajectory by name and returns a number, a `Grade` or None. A
    message without a tool call ends the episode. A tool that raises `ToolError` answers the agent
    with an error; any other exception fails the episode.

    >>> import skyfleet as sf
    >>> def press(state: dict, times: int) -> str:
    ...     "Press the button."
    ...     state["n"] += times
    ...     return f"pressed {state['n']} times"
    >>> env = sf.ToolEnv(
    ...     tools=[press],
    ...     setup=lambda task: {"n": 0},
    ...     reward=lambda task, state: float(state["n"] == task["times"]),
    ... )
    >>> sf.rollout("null", env, {"prompt": "Press the button 3 times.", "times": 3}).reward
    0.0
    """

    def __init__(
        self,
        tools: Sequence[Function] = (),
        *,
        reward: Function,
        setup: Function | None = None,
        system_prompt: str | None = None,
        max_turns: int | None = None,
        where: str = "sf.ToolEnv",
    ) -> None:
        self.tools = tuple(tools)
        names = [build_tool(function).spec.name for function in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{where}(tools=...): two tools are named {twice[0]}; rename one")
        self.setup, self.reward = setup, reward
        self.system_prompt, self.max_turns = system_prompt, max_turns
        offered = REWARD_ARGUMENTS
        if setup is None:
            offered = tuple(name for name in offered if name != "state")
        else:
            requested_names(setup, ("task",), where=f"{where}(..., setup={name_function(setup)})")
        requested_names(reward, offered, where=f"{where}(..., reward={name_function(reward)})")

    async def __call__(self, task: Task) -> PythonEnv:
        """Open an episode."""
        calls, view = EpisodeCalls(task.key), view_task(task)
        try:
            state = (
                None if self.setup is None else await _call_by_name(calls, self.setup, task=view)
            )
        except BaseException:
            calls.end()
            raise
        prompt = as_messages(view.prompt)
        if self.system_prompt is not None:
            prompt = (Message(role="system", content=self.system_prompt), *prompt)
        return PythonEnv(
            task,
            calls,
            reset=lambda: Observation(prompt, tools=self.tools),
            grade=self.reward,
            state=state,
        )

    def __repr__(self) -> str:
        names = ", ".join(build_tool(function).spec.name for function in self.tools)
        return f"ToolEnv(tools=[{names}], reward={name_function(self.reward)})"


class PythonEnv:
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
        state: object = None,
    ) -> None:
        self._task, self._calls, self._state = task, calls, state
        self._reset, self._step, self._grade, self._close = reset, step, grade, close
        self._tools: dict[str, PythonTool] = {}
        self._opening: tuple[Message, ...] = ()
        self._turns: list[Turn] = []
        self._ending = Ending.MAX_TURNS

    @property
    def task_prompt(self) -> tuple[Message, ...]:
        return as_messages(view_task(self._task).prompt)

    async def reset(self) -> protocol.Observation:
        given = await _call_by_name(self._calls, self._reset, task=view_task(self._task))
        observation = given if isinstance(given, protocol.Observation) else Observation(given)
        if isinstance(observation, Observation):
            self._tools = {function.spec.name: function for function in observation.functions}
        self._opening, self._turns = observation.messages, []
        return _plain(observation)

    async def step(self, action: Message) -> protocol.Step:
        if self._step is None:
            step = await self.call_tools(action)
        else:
            step = _as_step(await self._calls.call(self._step, action))
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
        return await take_turn(action, self._answer)

    async def grade(self) -> Grade | None:
        """The user's grade, or without one the sum of the step rewards."""
        if self._grade is None:
            total = float(sum(turn.reward for turn in self._turns))
            return grade_from(total, by="the sum of the step rewards")
        result = await _call_by_name(self._calls, self._grade, **self._reward_values())
        return grade_from(result, by=name_function(self._grade))

    async def close(self) -> None:
        try:
            if self._close is not None:
                await self._calls.call(self._close)
        finally:
            self._calls.end()

    async def _answer(self, call: ToolCall) -> protocol.Step:
        values = {"state": self._state, "task": view_task(self._task)}
        try:
            if call.name not in self._tools:
                raise ToolError(f"no tool {call.name!r}; choose from {', '.join(self._tools)}")
            text = await self._tools[call.name].call(call.arguments, self._calls, values)
            is_error = False
        except ToolError as error:
            text, is_error = f"Error: {error}", True
        reply = Message(role="tool", content=text, tool_call_id=call.id, is_error=is_error)
        return protocol.Step(messages=(reply,))

    def _reward_values(self) -> dict[str, Any]:
        said = [message for turn in self._turns for message in (turn.action, *turn.replies)]
        return {
            "task": view_task(self._task),
            "state": self._state,
            "answer": self._turns[-1].action.text if self._turns else "",
            "messages": [*self._opening, *said],
            "trajectory": Trajectory(
                task_key=self._task.key,
                env_key=self._task.env_key,
                sample=0,
                opening=self._opening,
                turns=tuple(self._turns),
                transcripts=(),
                ending=self._ending,
                grade=None,
            ),
        }


def as_env_factory(env: object, *, where: str = "env") -> protocol.EnvFactory:
    """An EnvFactory from a ToolEnv, an Env class or instance, or a function from task to Env.

    A class is instantiated per episode, an instance is copied per episode.
    """
    if isinstance(env, ToolEnv):
        return env
    if inspect.isclass(env):
        _check_methods(env, where)
        names = requested_names(env, ("task",), where=f"{where}: {env.__name__}")
        return lambda task: _open_made(task, env if names else (lambda task: env()))
    if isinstance(env, Env) or (hasattr(env, "reset") and not inspect.isroutine(env)):
        _check_methods(env, where)
        return lambda task: _open_made(task, lambda task: copy.deepcopy(env))
    if callable(env):
        return lambda task: _open_made(task, env)
    raise ConfigError(
        f"{where}: {env!r:.80} is not an environment; pass sf.ToolEnv(...), a subclass of sf.Env, "
        'a function from a task to one, or a name such as "world:github"'
    )


def _check_methods(env: object, where: str) -> None:
    name = env.__name__ if inspect.isclass(env) else type(env).__name__
    if not hasattr(env, "reset") or not hasattr(env, "step"):
        raise ConfigError(f"{where}: {name} has no reset and step; derive it from sf.Env")
    grade = getattr(env, "grade", None)
    if inspect.isclass(env) and grade is not None:
        offered = ("self", *REWARD_ARGUMENTS)
        requested_names(grade, offered, where=f"{where}: {name}.grade")


async def _open_made(task: Task, make: Callable[[Any], Any]) -> protocol.Env:
    calls = EpisodeCalls(task.key)
    try:
        made = await calls.call(make, view_task(task))
    except BaseException:
        calls.end()
        raise
    if _is_protocol_env(made):
        calls.end()
        env: protocol.Env = made
        return env
    wrapped = PythonEnv(
        task,
        calls,
        reset=made.reset,
        step=None if type(made).step is Env.step else made.step,
        grade=getattr(made, "grade", None),
        close=getattr(made, "close", None),
        state=getattr(made, "state", None),
    )
    if isinstance(made, Env):
        made._episode = wrapped
    return wrapped


def _is_protocol_env(made: object) -> bool:
    """A complete async Env is used as it is."""
    methods = (getattr(made, name, None) for name in ("reset", "step", "grade", "close"))
    return not isinstance(made, Env) and all(map(inspect.iscoroutinefunction, methods))


def _as_step(given: object) -> protocol.Step:
    if isinstance(given, protocol.Step):
        return given
    if isinstance(given, str | Message):
        return Step(given)
    raise EnvError(f"step() returned {given!r:.100}; return sf.Step(...) or a text")


async def _call_by_name(calls: EpisodeCalls, function: Function, **values: Any) -> Any:
    names = requested_names(function, tuple(values), where=name_function(function))
    return await calls.call(function, **{name: values[name] for name in names})
