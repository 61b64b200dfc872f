"""Environments that users write in plain Python: `ToolEnv` from functions, `Env` as a class."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from skyfleet.chat.message import Message
from skyfleet.envs import env as protocol
from skyfleet.envs.isolation import MovableFactory
from skyfleet.envs.python_episode import (
    REWARD_ARGUMENTS,
    Observation,
    PythonEpisode,
    call_by_name,
    prompt_messages,
)
from skyfleet.envs.python_tools import (
    EpisodeCalls,
    Function,
    build_tool,
    name_function,
    requested_names,
)
from skyfleet.errors import ConfigError, EnvError
from skyfleet.tasks.task import Task


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

    _episode: PythonEpisode | None = None

    def reset(self) -> Any:
        """Return the task's prompt, without tools."""
        return self._running().task_prompt

    def step(self, message: Message) -> Any:
        """Call the tools of the observation; a message without a tool call ends the episode.

        A coroutine: an async override awaits it, a sync one returns it.
        """
        return self._running().call_tools(message)

    def _running(self) -> PythonEpisode:
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
    with an error; any other exception fails the episode. `name` is the environment's name in reports
    and metrics; unset, the run's name.

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
        name: str | None = None,
    ) -> None:
        if callable(tools):
            given = name_function(tools)
            raise ConfigError(f"sf.ToolEnv(tools={given}): pass a list: tools=[{given}]")
        self.tools = tuple(build_tool(function) for function in tools)
        names = [tool.spec.name for tool in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"sf.ToolEnv(tools=...): two tools are named {twice[0]}; rename one")
        self.setup, self.reward = setup, reward
        self.system_prompt, self.max_turns, self.name = system_prompt, max_turns, name
        if setup is not None:
            where = f"sf.ToolEnv(..., setup={name_function(setup)})"
            requested_names(setup, ("task",), where=where)
        check_reward(reward, "sf.ToolEnv", with_state=setup is not None)

    async def __call__(self, task: Task) -> PythonEpisode:
        """Open an episode."""
        calls = EpisodeCalls(task.key)
        try:
            state = None if self.setup is None else await call_by_name(calls, self.setup, task=task)
        except BaseException:
            calls.end()
            raise
        prompt = prompt_messages(task)
        if self.system_prompt is not None:
            prompt = (Message(role="system", content=self.system_prompt), *prompt)
        return PythonEpisode(
            task,
            calls,
            reset=lambda: Observation(prompt, tools=self.tools),
            grade=self.reward,
            read_state=lambda: state,
        )

    def __repr__(self) -> str:
        names = ", ".join(tool.spec.name for tool in self.tools)
        return f"ToolEnv(tools=[{names}], reward={name_function(self.reward)})"


def check_reward(reward: Function, where: str, *, with_state: bool = False) -> None:
    """ConfigError if a reward function takes what it does not get; `where` is the call."""
    offered = [name for name in REWARD_ARGUMENTS if with_state or name != "state"]
    requested_names(reward, offered, where=f"{where}(..., reward={name_function(reward)})")


def as_env_factory(
    env: object, *, where: str = "env", spec: str | None = None
) -> protocol.EnvFactory:
    """An EnvFactory from a ToolEnv, an Env class or instance, or a function from task to Env.

    A class is instantiated per episode, an instance is copied per episode. `spec` is the
    `module:name` that a worker process can import it by; else it is pickled.
    """
    return MovableFactory(_make_factory(env, where), source=spec or env)


def _make_factory(env: object, where: str) -> protocol.EnvFactory:
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
    if grade is not None:
        offered = ("self", *REWARD_ARGUMENTS) if inspect.isclass(env) else REWARD_ARGUMENTS
        requested_names(grade, offered, where=f"{where}: {name}.grade")


async def _open_made(task: Task, make: Callable[[Any], Any]) -> protocol.Env:
    calls = EpisodeCalls(task.key)
    try:
        made = await calls.call(make, task)
        grade = getattr(made, "grade", None)
        grade_arguments = _check_grade(made, grade)
    except BaseException:
        calls.end()
        raise
    if _is_protocol_env(made) and not grade_arguments:
        calls.end()
        env: protocol.Env = made
        return env
    wrapped = PythonEpisode(
        task,
        calls,
        reset=made.reset,
        step=None if type(made).step is Env.step else made.step,
        grade=grade,
        close=getattr(made, "close", None),
        read_state=lambda: getattr(made, "state", None),
    )
    if isinstance(made, Env):
        made._episode = wrapped
    return wrapped


def _check_grade(made: object, grade: Function | None) -> tuple[str, ...]:
    """The arguments that its grade takes; EnvError if it takes any that it does not get."""
    if grade is None:
        return ()
    try:
        return requested_names(grade, REWARD_ARGUMENTS, where=f"{type(made).__name__}.grade")
    except ConfigError as error:
        raise EnvError(str(error)) from None


def _is_protocol_env(made: object) -> bool:
    """A complete async Env is used as it is."""
    methods = (getattr(made, name, None) for name in ("reset", "step", "grade", "close"))
    return not isinstance(made, Env) and all(map(inspect.iscoroutinefunction, methods))
