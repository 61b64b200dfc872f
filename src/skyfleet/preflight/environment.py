"""Checks of the environments: one task of each is opened, one of its tools called, and it is graded."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from random import Random

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.config.root import RunConfig
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import DONE, Observation
from skyfleet.envs.event_loop import run_loop
from skyfleet.envs.registry import env_factory
from skyfleet.preflight.check import (
    CheckFailedError,
    NotCheckedError,
    Subject,
    UnreachableError,
    WarningError,
    check,
)
from skyfleet.preflight.data import load_tasks_once
from skyfleet.rollouts.conversation import MessageConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.random_agent import random_object
from skyfleet.tasks.task import Task
from skyfleet.trainer.limits import build_limits
from skyfleet.trajectories.episode_clock import EpisodeTimeoutError
from skyfleet.trajectories.trajectory import Trajectory

_OPENED = "environment opened"
_SECONDS = 180
"""A third of it for each of playing, grading and closing. A hosted instance may take a minute."""
_MAX_CONCURRENT = 32
_MAX_CHARACTERS = 300
_EPISODE_LIMIT = "generator.trajectory_timeout_seconds"


@check(_OPENED, "environment", timeout_seconds=_SECONDS)
def check_opened(subject: Subject) -> str:
    def judge(played: Trajectory) -> str | None:
        return None if played.prompt else _describe_failure(played)

    episodes = _play_once(subject)
    _raise_problems(subject, episodes, judge)
    return ", ".join(episodes)


@check("tool called", "environment", timeout_seconds=_SECONDS)
def check_tool(subject: Subject) -> str:
    names: list[str] = []

    def judge(played: Trajectory) -> str | None:
        if not played.turns:
            return _describe_failure(played)
        turn = played.turns[0]
        if not turn.action.tool_calls:
            names.append(f"{played.env_key}: no tools, answered a message")
            return None
        call = turn.action.tool_calls[0]
        reply = next((one for one in turn.replies if one.role == "tool"), None)
        if reply is None:
            return f"{call.name} got no reply; check the environment's step"
        names.append(f"{played.env_key}: {call.name}{' (an error)' if reply.is_error else ''}")
        return None

    _raise_problems(subject, _list_opened(subject), judge)
    return ", ".join(names)


@check("graded", "environment", timeout_seconds=_SECONDS)
def check_graded(subject: Subject) -> str:
    def judge(played: Trajectory) -> str | None:
        return None if played.grade is not None else _describe_failure(played)

    episodes = {key: one for key, one in _list_opened(subject).items() if one.turns}
    if not episodes:
        raise NotCheckedError("no environment answered a tool call; see the row above")
    _raise_problems(subject, episodes, judge)
    return ", ".join(
        f"{key} {one.grade.reward:g}" for key, one in episodes.items() if one.grade is not None
    )


def _play_once(subject: Subject) -> dict[str, Trajectory]:
    """One short episode per environment, by env_key."""
    tasks = load_tasks_once(subject)
    first: dict[str, Task] = {}
    for task in tasks:
        if task.env_key not in first or (task.solution and not first[task.env_key].solution):
            first[task.env_key] = task
    return subject.share("episodes", lambda: run_loop(_play(subject, first)))


async def _play(subject: Subject, tasks: Mapping[str, Task]) -> dict[str, Trajectory]:
    semaphore = asyncio.Semaphore(_MAX_CONCURRENT)
    seconds = subject.timeout_seconds[_OPENED] / 3
    config = _shorten_wait(subject.config, seconds / 2)
    open_env = env_factory(config)
    limits = Limits(
        max_turns=2,
        max_input_length=sys.maxsize,
        trajectory_timeout_seconds=seconds,
        close_timeout_seconds=seconds,
        isolation=build_limits(config).isolation,
    )

    async def play(task: Task) -> Trajectory:
        async with semaphore:
            return await run_episode(task, open_env, _call_once, limits)

    async with asyncio.TaskGroup() as group:
        playing = {key: group.create_task(play(task)) for key, task in tasks.items()}
    return {key: one.result() for key, one in sorted(playing.items())}


def _shorten_wait(config: RunConfig, seconds: float) -> RunConfig:
    """A server that refuses connections is named before the time of the check is over."""
    environment = config.environment
    waits = min(environment.openenv.capacity_wait_seconds, seconds)
    openenv = environment.openenv.model_copy(update={"capacity_wait_seconds": waits})
    changed = environment.model_copy(update={"openenv": openenv})
    return config.model_copy(update={"environment": changed})


def _call_once(task: Task, observation: Observation, session: str) -> MessageConversation:
    return MessageConversation(observation, model=_OneCall(task), sampling=SamplingParams())


class _OneCall:
    """Makes the first call of the reference solution, or a random valid one; then it is done."""

    def __init__(self, task: Task) -> None:
        self._task, self._is_done = task, False

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        if self._is_done or not tools:
            return Message(role="assistant", content=DONE)
        self._is_done = True
        if self._task.solution:
            first = self._task.solution[0]
            name, arguments = first.name, first.arguments
        else:
            random = Random(self._task.key)
            tool = random.choice(tools)
            name, arguments = tool.name, random_object(tool.parameters, random)
        call = ToolCall(id="call_0", name=name, arguments=arguments)
        return Message(role="assistant", tool_calls=(call,))


def _list_opened(subject: Subject) -> dict[str, Trajectory]:
    """The episodes whose environment was opened; why others were not is in the row above."""
    try:
        episodes = _play_once(subject)
    except NotCheckedError:
        raise
    except Exception:
        episodes = {}
    opened = {key: one for key, one in episodes.items() if one.prompt}
    if not opened:
        raise NotCheckedError("no environment was opened; see the row above")
    return opened


def _raise_problems(
    subject: Subject, episodes: Mapping[str, Trajectory], judge: Callable[[Trajectory], str | None]
) -> None:
    found = {key: judge(one) for key, one in episodes.items()}
    problems = [f"{key}: {problem}" for key, problem in found.items() if problem]
    if not problems:
        return
    if not subject.is_recovery:
        raise CheckFailedError("\n".join(problems))
    # The run has trained on them before, so they are out of order and not wrong.
    kind = UnreachableError if len(problems) == len(episodes) else WarningError
    raise kind("\n".join(problems))


def _describe_failure(played: Trajectory) -> str:
    if played.failure is None:
        return "its grade is unknown (None); check its verifier"
    if played.failure.kind == EpisodeTimeoutError.__name__:
        return (
            f"no answer within {played.seconds:.0f} s; check its server, or raise --timeout-seconds"
        )
    # The limit is that of the check.
    detail = played.failure.detail.replace(_EPISODE_LIMIT, "--timeout-seconds")
    return f"{played.failure.kind}: {detail[:_MAX_CHARACTERS]}"
