"""Grade an episode within its time limit, and compare the grade with the step rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isclose
from weakref import WeakSet

from skyfleet.envs.env import (
    Env,
    EnvFactory,
    Step,
    episode_ending,
    episode_info,
    grade_env,
    is_graded_by_env,
)
from skyfleet.envs.guard import EnvGuard
from skyfleet.envs.validation import validate_grade, validate_info
from skyfleet.errors import VerifierError, wrap_errors
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.episode_clock import EpisodeClock
from skyfleet.trajectories.trajectory import Ending

logger = logging.getLogger(__name__)

_warned_factories: WeakSet[EnvFactory] = WeakSet()
"""Factories whose step rewards did not add up to a grade; a run has one factory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeGrade:
    grade: Grade | None
    info: Mapping[str, float]
    """Numbers that an adapter knows at the end only; they belong to the last turn."""
    is_by_env: bool
    """Whether the environment has a grade of its own."""


async def grade_episode(
    env: Env, steps: Sequence[Step], ending: Ending, *, guard: EnvGuard, timeout_seconds: float
) -> EpisodeGrade:
    async def grade() -> EpisodeGrade:
        info: dict[str, float] = {}
        tokens = episode_ending.set(ending), episode_info.set(info)
        try:
            graded = validate_grade(await grade_env(env, steps))
        finally:
            episode_ending.reset(tokens[0])
            episode_info.reset(tokens[1])
        return EpisodeGrade(
            grade=graded,
            info=validate_info(info) if info and steps else {},
            is_by_env=is_graded_by_env(env),
        )

    with wrap_errors(VerifierError, "grade"):
        async with EpisodeClock(timeout_seconds):
            graded: EpisodeGrade = await guard.call(VerifierError, "grade", grade)
    return graded


def check_step_rewards(
    steps: Sequence[Step], grade: Grade | None, task: Task, open_env: EnvFactory
) -> None:
    """Warn once per run if step rewards exist and do not add up to the grade."""
    rewards = [step.reward for step in steps]
    if grade is None or not any(rewards):
        return
    total = sum(rewards)
    if isclose(total, grade.reward, rel_tol=1e-6, abs_tol=1e-6) or open_env in _warned_factories:
        return
    with suppress(TypeError):  # a callable that has no weak references is reported every time
        _warned_factories.add(open_env)
    logger.warning(
        "task %s of %s: the step rewards add up to %g and grade() returned %g; the grade is the "
        "episode's reward. Return step rewards that add up to it, or none. "
        "This is logged once per run",
        task.key,
        task.env_key,
        total,
        grade.reward,
    )
