"""Replay: repeat the actions of a recorded episode and find the first difference."""

from __future__ import annotations

from dataclasses import dataclass

from skyfleet.envs.env import EnvFactory
from skyfleet.rollouts.episode import run_episode
from skyfleet.rollouts.scripted_agents import recorded_limits, recorded_policy
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Trajectory

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    replayed: Trajectory
    difference: str | None
    """None if every message, reward and grade is equal."""


async def replay(
    trajectory: Trajectory, task: Task, open_env: EnvFactory, *, timeout_seconds: float = 300
) -> Replay:
    """Repeat the actions in a new environment.

    For an episode that failed or timed out only the turns are compared, because the actions do not
    reproduce what ended it.
    """
    replayed = await run_episode(
        task,
        open_env,
        recorded_policy(trajectory),
        recorded_limits(trajectory, timeout_seconds=timeout_seconds),
        sample=trajectory.sample,
    )
    return Replay(replayed=replayed, difference=first_difference(trajectory, replayed))


def first_difference(recorded: Trajectory, replayed: Trajectory) -> str | None:
    """One sentence, or None if the episodes are equal."""
    if recorded.prompt != replayed.prompt:
        return _describe("prompt", recorded.prompt, replayed.prompt)
    pairs = zip(recorded.turns, replayed.turns, strict=False)
    for number, (one, other) in enumerate(pairs, start=1):
        if one.replies != other.replies:
            return _describe(f"replies of turn {number}", one.replies, other.replies)
        if one.reward != other.reward:
            return _describe(f"reward of turn {number}", one.reward, other.reward)
    if len(recorded.turns) != len(replayed.turns):
        return _describe(
            "turns", len(recorded.turns), f"{len(replayed.turns)}, {_ending(replayed)}"
        )
    if recorded.ending in (Ending.FAILED, Ending.TIMEOUT):
        return None
    if recorded.ending != replayed.ending:
        return _describe("ending", recorded.ending.value, _ending(replayed))
    if recorded.grade != replayed.grade:
        return _describe("grade", recorded.grade, replayed.grade or _ending(replayed))
    return None


def _describe(what: str, recorded: object, replayed: object) -> str:
    one, other = repr(recorded), repr(replayed)
    # The excerpt starts shortly before the first character that differs.
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, at - _SHOWN_CHARACTERS // 2)
    excerpt = slice(start, start + _SHOWN_CHARACTERS)
    return f"{what}: recorded {one[excerpt]}, replayed {other[excerpt]}"


def _ending(trajectory: Trajectory) -> str:
    failure = trajectory.failure
    return f"{trajectory.ending}: {failure.detail}" if failure else trajectory.ending.value
