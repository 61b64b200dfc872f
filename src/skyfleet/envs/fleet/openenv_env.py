"""OpenEnvFleetEnv: drives the public FleetTaskEnv of fleet-ai/OpenEnv, for env_class=openenv_fleet.

`skyfleet.envs.fleet.env` is our own client with the same semantics; docs/fleet.md compares the two.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from importlib import import_module
from typing import Any

from skyfleet.chat.message import Message, Part, ToolCall, ToolSpec
from skyfleet.config.root import RunConfig
from skyfleet.envs.content_blocks import parse_content_blocks, to_text, truncate
from skyfleet.envs.env import EnvFactory, Observation, Step
from skyfleet.envs.fleet.definitions import strip_to_definitions
from skyfleet.envs.fleet.env import make_prompt
from skyfleet.envs.fleet.replies import (
    add_screenshot,
    confirm_answer,
    make_error,
    make_reply,
    read_image_url,
    reject_answer,
    reject_unknown,
)
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.envs.tool_turns import SUBMIT_NAME, run_tool_calls
from skyfleet.envs.verifiers.conversation import conversation_json
from skyfleet.envs.verifiers.run_verifier import SUCCESS_REWARD
from skyfleet.errors import ConfigError, EnvError, VerifierError
from skyfleet.tasks.task import Grade, Task

logger = logging.getLogger(__name__)

MODULE = "envs.fleet_env"
"""Where fleet-ai/OpenEnv has FleetTaskEnv."""
_CREATION_GRACE_SECONDS = 20
"""How long a close waits for an instance that is still being created, in order to delete it."""
_POLL_SECONDS = 0.25
_closing: set[asyncio.Task[None]] = set()
"""Strong references, because the event loop keeps only weak ones to its tasks."""


def build_factory(config: RunConfig) -> EnvFactory:
    return openenv_fleet_factory(
        FleetSettings.from_config(
            config.environment.skyrl_gym.fleet_task,
            trajectory_timeout_seconds=config.generator.trajectory_timeout_seconds,
        ),
        allow_unconfined=config.environment.verifier.allow_unconfined,
    )


def openenv_fleet_factory(
    settings: FleetSettings, *, allow_unconfined: bool = False
) -> Callable[[Task], Awaitable[OpenEnvFleetEnv]]:
    """Open one FleetTaskEnv per task, in an instance of its own.

    `allow_unconfined` accepts verifiers that run code when the SDK loads them in this process.
    """
    task_env = import_task_env()

    async def open_fleet(task: Task) -> OpenEnvFleetEnv:
        if task.verifier_code is not None and not allow_unconfined:
            code = strip_to_definitions(task.verifier_code)
            task = task.model_copy(update={"verifier_code": code})
        return OpenEnvFleetEnv(task_env, task, settings)

    return open_fleet


def import_task_env() -> Callable[..., Any]:
    """Return the class FleetTaskEnv; ConfigError says how to install it."""
    # It logs to Logfire, which warns at every event if nobody has configured it.
    os.environ.setdefault("LOGFIRE_IGNORE_NO_CONFIG", "1")
    try:
        task_env: Callable[..., Any] = import_module(MODULE).FleetTaskEnv
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"environment.env_class=openenv_fleet needs {MODULE}.FleetTaskEnv ({error}); put the src "
            "folder of a checkout of fleet-ai/OpenEnv on PYTHONPATH and install skyfleet[fleet], or "
            "set environment.env_class=fleet_task, which needs neither"
        ) from error
    return task_env


@dataclass(slots=True, kw_only=True)
class _Episode:
    """The state since the last reset."""

    env: Any
    resetting: asyncio.Task[Any]
    tools: dict[str, ToolSpec] = field(default_factory=dict)
    turns: list[dict[str, str]] = field(default_factory=list)
    """The conversation; FleetTaskEnv holds this list and passes it to verifiers that ask for it."""
    done: bool = False
    graded: bool = False
    reward: float | None = None


class OpenEnvFleetEnv:
    def __init__(self, task_env: Callable[..., Any], task: Task, settings: FleetSettings) -> None:
        self._task_env, self._task, self._settings = task_env, task, settings
        self._episode: _Episode | None = None

    async def reset(self) -> Observation:
        await self.close()
        env = self._task_env(
            to_task_config(self._task),
            api_key=self._settings.api_key,
            ttl_seconds=self._settings.ttl_seconds,
            max_steps=sys.maxsize,  # the run limits turns, and every call is a step here
            partial_reward=self._settings.partial_reward,
        )
        # A separate task: if the episode is cancelled while Fleet creates the instance, close waits
        # for the instance and deletes it; a cancelled request would leave it running.
        resetting = asyncio.create_task(env.reset_async())
        episode = self._episode = _Episode(env=env, resetting=resetting)
        observed = await self._call("reset_async", asyncio.shield(resetting))
        episode.tools = {spec.name: spec for spec in map(_parse_tool, observed["tools"])}
        system, user = make_prompt(self._task, today=date.today())
        user = add_screenshot(user, self._show(observed.get("initial_screenshot")))
        env.conversation_messages = episode.turns
        _record(episode, system, user)
        return Observation(messages=(system, user), tools=tuple(episode.tools.values()))

    async def step(self, action: Message) -> Step:
        episode = self._open_episode
        if episode.done:
            raise EnvError(f"task {self._task.key}: step after done; open another env")
        _record(episode, action)

        async def answer(call: ToolCall) -> Step:
            return await self._answer(episode, call)

        step = await run_tool_calls(action, answer)
        episode.done = step.done
        _record(episode, *step.messages)
        return step

    async def grade(self) -> Grade:
        """Ask FleetTaskEnv for its reward. If that is None, the grade is unknown."""
        if self._task.verifier_code is None:
            raise VerifierError(f"task {self._task.key}: verifier_code is None; set it")
        episode = self._open_episode
        try:
            if not episode.graded:
                await self._step(episode, {"done": True})
        except EnvError as error:
            raise VerifierError(str(error)) from error
        reward = episode.reward
        if reward is None or not math.isfinite(reward):
            reason = episode.env.verifier_error or f"FleetTaskEnv returned {reward}"
            raise VerifierError(f"task {self._task.key}: no grade: {reason}")
        return Grade(
            reward=reward,
            success=reward >= SUCCESS_REWARD,
            explanation=episode.env.verifier_stdout or "",
        )

    async def close(self) -> None:
        """Delete the instance, even if the caller is cancelled meanwhile."""
        episode, self._episode = self._episode, None
        if episode is not None:
            closing = asyncio.create_task(_release(episode))
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)
            await asyncio.shield(closing)

    @property
    def _open_episode(self) -> _Episode:
        if self._episode is None:
            raise EnvError(f"task {self._task.key}: the env is not open; call reset first")
        return self._episode

    async def _answer(self, episode: _Episode, call: ToolCall) -> Step:
        if call.name not in episode.tools:
            return reject_unknown(call, episode.tools)
        submits = call.name == SUBMIT_NAME
        if submits and not isinstance(call.arguments.get("answer"), str):
            return reject_answer(call)
        action = {"tool": call.name, "params": dict(call.arguments)}
        info = await self._step(episode, action)
        if submits:
            return confirm_answer(call)
        problem, result = info.get("tool_error"), info.get("tool_result")
        if problem is not None and ("tool_result" not in info or result == {"error": problem}):
            return make_error(call, truncate(problem, self._settings.max_result_characters))
        return make_reply(call, self._show(result))

    async def _step(self, episode: _Episode, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Step FleetTaskEnv, keep the reward of the last step and return its info."""
        _, reward, done, info = await self._call("step_async", episode.env.step_async(action))
        if done:
            episode.graded, episode.reward = True, reward
        given: Mapping[str, Any] = info
        return given

    async def _call(self, name: str, result: Awaitable[Any]) -> Any:
        try:
            return await result
        except Exception as error:
            raise EnvError(
                f"task {self._task.key}: FleetTaskEnv.{name}: {type(error).__name__}: {error}"
            ) from error

    def _show(self, result: Any) -> str | tuple[Part, ...]:
        """Text stays as it is, images become parts, and any other value is shown as JSON."""
        limit = self._settings.max_result_characters
        if isinstance(result, list) and any(map(_is_image, result)):
            blocks = [
                read_image_url(one["image_url"]["url"]) if _is_image(one) else one for one in result
            ]
            return parse_content_blocks(blocks, max_characters=limit)
        return to_text(result, max_characters=limit)


def to_task_config(task: Task) -> dict[str, Any]:
    """Return the row in the names that FleetTaskEnv reads; it has no defaults for missing values."""
    row = {
        "task_key": task.key,
        "prompt": task.prompt,
        "env_key": task.env_key,
        "env_version": task.env_version,
        "data_key": task.data_key,
        "data_version": task.data_version,
        "env_variables": task.env_variables or None,
        "verifier_code": task.verifier_code,
        "task_modality": task.modality,
    }
    return {name: value for name, value in row.items() if value is not None}


def _record(episode: _Episode, *messages: Message) -> None:
    episode.turns.extend(json.loads(conversation_json(messages)))


def _parse_tool(tool: Mapping[str, Any]) -> ToolSpec:
    function = tool["function"]
    return ToolSpec(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function["parameters"],
    )


def _is_image(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "image_url"


async def _release(episode: _Episode) -> None:
    """Close FleetTaskEnv and delete its instance.

    Its own close does not await the request that deletes the instance, and it grades an episode
    that ended without a grade, which nobody asks for any more. So it is closed without its instance.
    """
    env, resetting = episode.env, episode.resetting
    with suppress(TimeoutError):
        async with asyncio.timeout(_CREATION_GRACE_SECONDS):
            while not resetting.done() and env._orch is None:
                await asyncio.wait({resetting}, timeout=_POLL_SECONDS)
            while not resetting.done():
                # It catches a cancellation while it lists tools, and tries again.
                resetting.cancel()
                await asyncio.wait({resetting}, timeout=_POLL_SECONDS)
    resetting.cancel()
    orchestrator, instance = env._orch, None
    if orchestrator is not None:
        instance, orchestrator._fleet_env = orchestrator._fleet_env, None
    try:
        await env.close_async()
    finally:
        if instance is not None:
            await _delete(instance)


async def _delete(instance: Any) -> None:
    try:
        deleted = instance.close()
        if inspect.isawaitable(deleted):
            await deleted
    except Exception as error:
        logger.warning("%s was not deleted, its ttl will end it: %r", instance.instance_id, error)
    finally:
        # The SDK opens a connection pool per instance and never closes it.
        pool = getattr(getattr(instance, "_client", None), "httpx_client", None)
        if pool is not None:
            await pool.aclose()
