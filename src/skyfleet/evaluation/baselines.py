"""Baselines: pass rates of the null agent and of the reference solution on the same tasks.

A task that passes when nothing is done is vacuous; a task whose reference solution fails is
impossible. Scores on such tasks are misleading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from skyfleet.envs.env import EnvFactory
from skyfleet.evaluation.score import PASS_THRESHOLD, passes
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import EpisodeRunner, Limits, collect
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import NULL_SUCCESS, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Of one environment. Rates are over graded attempts, one per task."""

    null_rate: float | None
    oracle_rate: float | None
    """None if no task has a reference solution or none was graded."""
    vacuous: tuple[str, ...]
    """Keys of the tasks that the null agent passes."""
    impossible: tuple[str, ...]
    """Keys of the tasks whose reference solution does not pass."""


async def measure_baselines(
    tasks: Sequence[Task],
    open_env: EnvFactory,
    limits: Limits,
    *,
    max_concurrent: int,
    pass_threshold: float = PASS_THRESHOLD,
    run: EpisodeRunner | None = None,
) -> dict[str, Baseline]:
    """By environment: two scripted episodes per task, under the policy's limits.

    Tasks that declare what the null agent scores are not played by it.
    """

    async def passed(tasks: Sequence[Task], policy: AgentFactory) -> dict[str, bool]:
        """By task key, without ungraded tasks."""
        groups = await collect(
            tasks, open_env, policy, limits, n_samples=1, max_concurrent=max_concurrent, run=run
        )
        grades = {group.task_key: group.trajectories[0].grade for group in groups}
        return {k: passes(grade, pass_threshold) for k, grade in grades.items() if grade}

    null = _read_declared(tasks)
    null |= await passed([task for task in tasks if task.key not in null], null_policy)
    oracle = await passed([task for task in tasks if task.solution], oracle_policy)
    return {
        env_key: _baseline([task.key for task in tasks if task.env_key == env_key], null, oracle)
        for env_key in sorted({task.env_key for task in tasks})
    }


def find_declared_baselines(tasks: Sequence[Task]) -> dict[str, Baseline]:
    """What is known without playing: environments of which every task declares the null score."""
    declared = _read_declared(tasks)
    by_env: dict[str, list[str]] = {}
    for task in tasks:
        by_env.setdefault(task.env_key, []).append(task.key)
    return {
        env_key: _baseline(keys, declared, {})
        for env_key, keys in sorted(by_env.items())
        if declared.keys() >= set(keys)
    }


def _read_declared(tasks: Sequence[Task]) -> dict[str, bool]:
    """Whether the null agent passes, by the key of each task that declares it."""
    return {
        task.key: task.metadata[NULL_SUCCESS]
        for task in tasks
        if isinstance(task.metadata.get(NULL_SUCCESS), bool)
    }


def _baseline(
    task_keys: Sequence[str], null: Mapping[str, bool], oracle: Mapping[str, bool]
) -> Baseline:
    return Baseline(
        null_rate=_rate(null[key] for key in task_keys if key in null),
        oracle_rate=_rate(oracle[key] for key in task_keys if key in oracle),
        vacuous=tuple(key for key in task_keys if null.get(key) is True),
        impossible=tuple(key for key in task_keys if oracle.get(key) is False),
    )


def _rate(passed: Iterable[bool]) -> float | None:
    known = list(passed)
    return fmean(known) if known else None


def baseline_faults(baselines: Mapping[str, Baseline]) -> Iterator[str]:
    """One sentence per environment whose score is misleading."""
    for env_key, baseline in baselines.items():
        if baseline.vacuous:
            yield (
                f"{env_key}: {baseline.null_rate:.1%} of the tasks pass when nothing is done "
                f"({_list_keys(baseline.vacuous)}); quarantine these tasks with "
                "`skyfleet tasks validate`"
            )
        if baseline.impossible:
            yield (
                f"{env_key}: the reference solutions pass only {baseline.oracle_rate:.1%} of the "
                f"tasks ({_list_keys(baseline.impossible)} fail); raise generator.max_turns or "
                "repair these tasks"
            )


def _list_keys(task_keys: Sequence[str]) -> str:
    more = len(task_keys) - 1
    return f"{task_keys[0]} and {more} more" if more else task_keys[0]
