"""SkyrlGymEnv: any BaseTextEnv of skyrl-gym, unchanged.

Text goes in, all that the model wrote; messages and a reward come out, and the grade is the sum of
the rewards. Methods that block run in the env's own thread; async twins are preferred.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, get_args

from skyfleet.chat.message import Message, Role
from skyfleet.config.imports import import_named
from skyfleet.envs.env import EnvFactory, Observation, Step
from skyfleet.envs.env_thread import EnvThread
from skyfleet.errors import ConfigError, EnvError, MissingExtraError
from skyfleet.tasks.task import Grade, Task

_RIGHT = 1.0
"""What skyrl-gym's envs give a right answer; less is partial credit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyrlGymSettings:
    env_id: str
    """A registered name such as gsm8k, or any class as module:Class."""
    max_turns: int
    """Written into every env's extras, as SkyRL's generator does."""
    env_config: Mapping[str, Any] = field(default_factory=dict)
    max_env_workers: int = 32
    """Blocking calls at one time; 0 makes them in the event loop."""


def skyrl_gym_factory(settings: SkyrlGymSettings) -> EnvFactory:
    """The row's `metadata` is the extras: reward_spec, extra_info and whatever else the env reads."""
    make = _maker(settings.env_id)
    workers = settings.max_env_workers
    slots = asyncio.Semaphore(workers) if workers else None

    async def open_env(task: Task) -> SkyrlGymEnv:
        extras = {"task_key": task.key, **deepcopy(task.metadata), "max_turns": settings.max_turns}
        build = partial(make, env_config=_readable(settings.env_config), extras=extras)
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
        """`slots` None: what blocks, blocks the event loop."""
        self._build = build
        self._task = task
        self._slots = slots
        self._state = _State.NEW
        self._thread: EnvThread | None = None
        self._env: Any = None
        self._history: list[Any] = []
        self._rewards: list[float] = []

    async def reset(self) -> Observation:
        self._require(_State.NEW)
        self._state = _State.OPEN
        if self._slots is not None:
            self._thread = EnvThread(f"skyrl_gym {self._task.key}", self._slots)
        await self._run(self._construct)
        prompt = [{"role": "user", "content": self._task.prompt}]
        self._history, _ = await self._call("init", prompt)
        return Observation(messages=self._read(self._history))

    async def step(self, action: Message) -> Step:
        self._require(_State.OPEN)
        said = as_written(action)
        output = await self._call("step", said)
        self._refuse_rewriting(output, said)
        observations = list(output["observations"])
        # The env may hold the list that init returned and count on finding the talk in it.
        self._history += [{"role": "assistant", "content": said}, *observations]
        self._rewards.append(float(output["reward"]))
        if output["done"]:
            self._state = _State.DONE
        return Step(
            messages=self._read(observations),
            done=bool(output["done"]),
            reward=self._rewards[-1],
            info=_numbers(output.get("metadata") or {}) | _numbers(await self._call("get_metrics")),
        )

    async def grade(self) -> Grade:
        total = sum(self._rewards)
        parts = {f"turn_{turn}": reward for turn, reward in enumerate(self._rewards)}
        return Grade(reward=total, success=total >= _RIGHT, parts=parts)

    async def close(self) -> None:
        """Waits for no call that was given up: the env is closed when it returns, if ever."""
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        if self._thread is not None and self._thread.stuck:
            self._thread.end_with(self._shut)
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

    def _shut(self) -> None:
        if self._env is not None:
            self._env.close()

    async def _call(self, method: str, *args: Any) -> Any:
        twin = getattr(self._env, f"{method}_async", None)
        if twin is not None:
            return await twin(*args)
        return await self._run(getattr(self._env, method), *args)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._thread is None:
            return function(*args)
        return await self._thread.call(function, *args)

    def _read(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
        for message in messages:
            if message["role"] not in get_args(Role) or not isinstance(message["content"], str):
                raise EnvError(
                    f"task {self._task.key}: the env said {str(message)[:80]}; "
                    f"give a role of {', '.join(get_args(Role))} and text as content"
                )
        return tuple(Message(role=said["role"], content=said["content"]) for said in messages)

    def _refuse_rewriting(self, output: Mapping[str, Any], said: str) -> None:
        """Sampled tokens are trained on as they are, so nothing said may be said otherwise."""
        metadata = output.get("metadata") or {}
        if output.get("postprocessed_action") not in (None, said):
            what = "the model's words (postprocessed_action); stop it earlier by stop strings"
        elif metadata.get("modified_chat_history") is not None:
            what = (
                "the talk so far (modified_chat_history); turn its context tools off and set "
                "environment.enable_context_tools=true"
            )
        else:
            return
        raise EnvError(f"task {self._task.key}: the env rewrites {what}")


def as_written(action: Message) -> str:
    """All the model wrote, thought and calls included, in the tags it writes them in."""
    calls = (
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': dict(call.arguments)}, ensure_ascii=False)}\n</tool_call>"
        for call in action.tool_calls
    )
    speech = "\n".join(filter(None, (action.text, *calls, *action.malformed_calls)))
    if action.reasoning is None:
        return speech
    return f"<think>\n{action.reasoning}\n</think>\n\n{speech}"


def _maker(env_id: str) -> Callable[..., Any]:
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
    maker: Callable[..., Any] = import_named(env_id, key="environment.skyrl_gym.env_id")
    return maker


def _readable(env_config: Mapping[str, Any]) -> Any:
    """By key and by attribute, as in SkyRL; an attribute that is not set is an error, not None."""
    from omegaconf import OmegaConf

    config = OmegaConf.create(dict(env_config))
    OmegaConf.set_struct(config, True)
    return config


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
