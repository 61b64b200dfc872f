"""SkyrlGymEnv: adapter for any BaseTextEnv of skyrl-gym, unchanged.

The environment receives the text that the model wrote and returns messages and a reward. The grade
is the sum of the step rewards. Blocking methods run in a thread of the environment's own; async
methods (`step_async` and so on) are preferred.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, get_args

from skyfleet.chat.message import Message, Role
from skyfleet.config.environment import SkyrlGym
from skyfleet.config.imports import import_named
from skyfleet.config.root import RunConfig
from skyfleet.envs.env import EnvFactory, Observation, Step, episode_info, sum_step_rewards
from skyfleet.envs.env_thread import EnvThread
from skyfleet.errors import ConfigError, EnvError, MissingExtraError
from skyfleet.tasks.task import Grade, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyrlGymSettings:
    env_id: str
    """A registered name such as gsm8k, or any class as module:Class."""
    max_turns: int
    """Written into every environment's extras, as SkyRL's generator does."""
    env_config: Mapping[str, Any] = field(default_factory=dict)
    max_env_workers: int = 32
    """Concurrent blocking calls; 0 makes them in the event loop."""

    @classmethod
    def from_config(
        cls, section: SkyrlGym, *, max_turns: int, env_id: str | None = None
    ) -> SkyrlGymSettings:
        """`env_id` replaces the section's, for a run or a row that names the environment itself."""
        env_id = env_id or section.env_id
        if env_id is None:
            raise ConfigError("environment.skyrl_gym.env_id is not set; write a name such as gsm8k")
        return cls(
            env_id=env_id,
            max_turns=max_turns,
            env_config=section.env_config,
            max_env_workers=section.max_env_workers,
        )


def build_factory(config: RunConfig, *, env_id: str | None = None) -> EnvFactory:
    return skyrl_gym_factory(
        SkyrlGymSettings.from_config(
            config.environment.skyrl_gym, max_turns=config.generator.max_turns, env_id=env_id
        )
    )


def list_registered() -> tuple[str, ...]:
    """Return the names that skyrl-gym registers; empty if the package is not installed."""
    try:
        import skyrl_gym
    except ImportError:
        return ()
    return tuple(skyrl_gym.registry)


def skyrl_gym_factory(settings: SkyrlGymSettings) -> Callable[[Task], Awaitable[SkyrlGymEnv]]:
    """The row's `metadata` becomes the extras: reward_spec, extra_info and the other columns."""
    make = _find_constructor(settings.env_id)
    workers = settings.max_env_workers
    slots = asyncio.Semaphore(workers) if workers else None

    async def open_env(task: Task) -> SkyrlGymEnv:
        extras = {"task_key": task.key, **deepcopy(task.metadata), "max_turns": settings.max_turns}
        build = partial(make, env_config=_make_config(settings.env_config), extras=extras)
        return SkyrlGymEnv(build, task, slots)

    return open_env


class _State(Enum):
    NEW = "not open; call reset first"
    OPEN = "open"
    DONE = "done; open another"
    CLOSED = "closed; open another"


class SkyrlGymEnv:
    def __init__(
        self, build: Callable[[], Any], task: Task, slots: asyncio.Semaphore | None
    ) -> None:
        """With `slots=None` blocking calls block the event loop."""
        self._build = build
        self._task = task
        self._slots = slots
        self._state = _State.NEW
        self._thread: EnvThread | None = None
        self._env: Any = None
        self._history: list[Any] = []
        self._steps: list[Step] = []

    async def reset(self) -> Observation:
        self._require(_State.NEW)
        self._state = _State.OPEN
        if self._slots is not None:
            self._thread = EnvThread(f"skyrl_gym {self._task.key}", self._slots)
        await self._run(self._construct)
        self._history, _ = await self._call("init", list(self._task.chat))
        return Observation(messages=self._parse_messages(self._history))

    async def step(self, action: Message) -> Step:
        self._require(_State.OPEN)
        text = format_action(action)
        output = await self._call("step", text)
        self._reject_rewriting(output, text)
        observations = list(output["observations"])
        # The environment may hold the list that init returned and expect the conversation in it.
        self._history += [{"role": "assistant", "content": text}, *observations]
        step = Step(
            messages=self._parse_messages(observations),
            done=bool(output["done"]),
            reward=float(output["reward"]),
            info=_select_numbers(output.get("metadata") or {}),
        )
        self._steps.append(step)
        if step.done:
            self._state = _State.DONE
        return step

    async def grade(self) -> Grade:
        info = episode_info.get()
        if info is not None and self._env is not None:
            # As in SkyRL, once per episode: they describe the whole of it.
            info.update(_select_numbers(await self._call("get_metrics")))
        return sum_step_rewards(self._steps)

    async def close(self) -> None:
        """Close without waiting for an abandoned call: the env is closed when that returns."""
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        if self._thread is not None and self._thread.stuck:
            self._thread.end_with(self._close_env)
            return
        try:
            if self._env is not None:
                await self._call("close")
        finally:
            if self._thread is not None:
                self._thread.end()

    def _require(self, state: _State) -> None:
        if self._state is not state:
            raise EnvError(f"task {self._task.key}: the env is {self._state.value}")

    def _construct(self) -> None:
        self._env = self._build()

    def _close_env(self) -> None:
        if self._env is not None:
            self._env.close()

    async def _call(self, method: str, *args: Any) -> Any:
        async_method = getattr(self._env, f"{method}_async", None)
        if async_method is not None:
            return await async_method(*args)
        return await self._run(getattr(self._env, method), *args)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._thread is None:
            return function(*args)
        return await self._thread.call(function, *args)

    def _parse_messages(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
        for message in messages:
            if message["role"] not in get_args(Role) or not isinstance(message["content"], str):
                raise EnvError(
                    f"task {self._task.key}: the env returned the message {str(message)[:80]}; "
                    f"use a role of {', '.join(get_args(Role))} and text as content"
                )
        return tuple(Message(role=one["role"], content=one["content"]) for one in messages)

    def _reject_rewriting(self, output: Mapping[str, Any], text: str) -> None:
        """Sampled tokens are trained on as they are, so the text must not be changed afterwards."""
        metadata = output.get("metadata") or {}
        if output.get("postprocessed_action") not in (None, text):
            problem = "the model's text (postprocessed_action); end it earlier with stop strings"
        elif metadata.get("modified_chat_history") is not None:
            problem = (
                "the conversation so far (modified_chat_history); disable its context tools and "
                "set environment.enable_context_tools=true"
            )
        else:
            return
        raise EnvError(f"task {self._task.key}: the env rewrites {problem}")


def format_action(action: Message) -> str:
    """Return all that the model wrote, with its thinking and its calls in their tags."""
    calls = (
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': dict(call.arguments)}, ensure_ascii=False)}\n</tool_call>"
        for call in action.tool_calls
    )
    text = "\n".join(filter(None, (action.text, *calls, *action.malformed_calls)))
    if action.reasoning is None:
        return text
    return f"<think>\n{action.reasoning}\n</think>\n\n{text}"


def _find_constructor(env_id: str) -> Callable[..., Any]:
    try:
        import skyrl_gym
    except ImportError as error:
        raise MissingExtraError("skyrl-gym", "skyrl-gym") from error
    if env_id in skyrl_gym.registry:
        return partial(skyrl_gym.make, env_id)
    if ":" not in env_id:
        raise ConfigError(
            f"environment.skyrl_gym.env_id={env_id!r} is not registered; "
            f"choose from {', '.join(skyrl_gym.registry)}, or write module:Class"
        )
    constructor: Callable[..., Any] = import_named(env_id, key="environment.skyrl_gym.env_id")
    return constructor


def _make_config(env_config: Mapping[str, Any]) -> Any:
    """Allow access by key and attribute, as in SkyRL; a missing attribute is an error, not None."""
    from omegaconf import OmegaConf

    config = OmegaConf.create(dict(env_config))
    OmegaConf.set_struct(config, True)
    return config


def _select_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
