"""Replay: a recorded episode played again in its world, and the first thing that is different."""

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
    """None: every message, reward and grade is the same."""


async def replay(
    trajectory: Trajectory, task: Task, open_env: EnvFactory, *, timeout_seconds: float = 300
) -> Replay:
    """The same actions in a world opened anew.

    Of an episode that was broken off (failed, or out of time) only its turns are asked to be the
    same: what ended it is not in its actions.
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
    """One sentence, or None."""
    if recorded.opening != replayed.opening:
        return _told("opening", recorded.opening, replayed.opening)
    pairs = zip(recorded.turns, replayed.turns, strict=False)
    for number, (one, other) in enumerate(pairs, start=1):
        if one.replies != other.replies:
            return _told(f"replies of turn {number}", one.replies, other.replies)
        if one.reward != other.reward:
            return _told(f"reward of turn {number}", one.reward, other.reward)
    if len(recorded.turns) != len(replayed.turns):
        return _told("turns", len(recorded.turns), f"{len(replayed.turns)}, {_ending(replayed)}")
    if recorded.ending in (Ending.FAILED, Ending.TIMEOUT):
        return None
    if recorded.ending != replayed.ending:
        return _told("ending", recorded.ending.value, _ending(replayed))
    if recorded.grade != replayed.grade:
        return _told("grade", recorded.grade, replayed.grade or _ending(replayed))
    return None


def _told(what: str, recorded: object, replayed: object) -> str:
    one, other = repr(recorded), repr(replayed)
    # What is shown begins shortly before the first character that differs.
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, at - _SHOWN_CHARACTERS // 2)
    shown = slice(start, start + _SHOWN_CHARACTERS)
    return f"{what}: recorded {one[shown]}, replayed {other[shown]}"


def _ending(trajectory: Trajectory) -> str:
    failure = trajectory.failure
    return f"{trajectory.ending}: {failure.detail}" if failure else trajectory.ending.value
