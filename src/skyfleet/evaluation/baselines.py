"""Baselines: what doing nothing and the reference solution earn on the same tasks.

A set on which doing nothing passes is vacuous, one on which the reference fails is impossible;
no score on either means what it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from skyfleet.envs.env import EnvFactory
from skyfleet.evaluation.score import PASS_THRESHOLD, passes
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Of one environment. Rates are over graded attempts, one a task."""

    null_rate: float | None
    oracle_rate: float | None
    """None: no task has a reference solution, or none could be graded."""
    vacuous: tuple[str, ...]
    """Keys of the tasks that pass when nothing is done."""
    impossible: tuple[str, ...]
    """Keys of the tasks whose reference solution does not pass."""


async def measure_baselines(
    tasks: Sequence[Task],
    open_env: EnvFactory,
    limits: Limits,
    *,
    max_concurrent: int,
    pass_threshold: float = PASS_THRESHOLD,
) -> dict[str, Baseline]:
    """By environment: two scripted episodes a task, within the limits a policy has."""

    async def passed(tasks: Sequence[Task], policy: AgentFactory) -> dict[str, bool]:
        """By task key; what could not be graded is not in it."""
        groups = await collect(
            tasks, open_env, policy, limits, n_samples=1, max_concurrent=max_concurrent
        )
        grades = {group.task_key: group.trajectories[0].grade for group in groups}
        return {k: passes(grade, pass_threshold) for k, grade in grades.items() if grade}

    idle = await passed(tasks, null_policy)
    solved = await passed([task for task in tasks if task.solution], oracle_policy)
    return {
        env_key: _baseline([task.key for task in tasks if task.env_key == env_key], idle, solved)
        for env_key in sorted({task.env_key for task in tasks})
    }


def _baseline(
    task_keys: Sequence[str], idle: Mapping[str, bool], solved: Mapping[str, bool]
) -> Baseline:
    return Baseline(
        null_rate=_rate(idle[key] for key in task_keys if key in idle),
        oracle_rate=_rate(solved[key] for key in task_keys if key in solved),
        vacuous=tuple(key for key in task_keys if idle.get(key) is True),
        impossible=tuple(key for key in task_keys if solved.get(key) is False),
    )


def _rate(passed: Iterable[bool]) -> float | None:
    known = list(passed)
    return fmean(known) if known else None


def baseline_faults(baselines: Mapping[str, Baseline]) -> Iterator[str]:
    """A sentence for each environment on which a score does not mean what it says."""
    for env_key, baseline in baselines.items():
        if baseline.vacuous:
            yield (
                f"{env_key} is vacuous: doing nothing passes {baseline.null_rate:.1%} of it "
                f"({_named(baseline.vacuous)}); quarantine these tasks with "
                "`skyfleet tasks validate`"
            )
        if baseline.impossible:
            yield (
                f"{env_key} is impossible in part: its reference solutions pass "
                f"{baseline.oracle_rate:.1%} ({_named(baseline.impossible)} fail); raise "
                "generator.max_turns or repair these tasks"
            )


def _named(task_keys: Sequence[str]) -> str:
    more = len(task_keys) - 1
    return f"{task_keys[0]} and {more} more" if more else task_keys[0]
