"""Train/evaluation split of tasks, and nested subsets of them, by a hash of their keys."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from skyfleet.tasks.task import Task

Side = Literal["train", "validation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    eval_fraction: float = 0.02
    held_out_envs: frozenset[str] = frozenset()
    """Evaluated only, never trained on."""
    min_eval_tasks: int = 5
    """An env with fewer evaluation tasks evaluates none: the estimate would be too noisy."""
    max_eval_tasks: int | None = None
    """Limit of an env's expected evaluation tasks; Fleet's is 20. Held-out envs have none."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Fixed thresholds by env, whatever its size: no task changes side when tasks come or go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    train: tuple[Task, ...]
    eval: tuple[Task, ...]
    thresholds: Mapping[str, float]
    """By env: a task is evaluated if the hash fraction of its key is below."""


def split_tasks(tasks: Iterable[Task], rule: SplitRule) -> Split:
    """Split each env separately.

    The order of tasks has no effect. The number of an env's tasks moves its threshold, unless
    `rule.thresholds` fixes it.
    """
    by_env: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        by_env[task.env_key].append(task)
    thresholds = {env: _threshold(env, len(rows), rule) for env, rows in sorted(by_env.items())}
    train: list[Task] = []
    evaluation: list[Task] = []
    for env_key, threshold in thresholds.items():
        for task in by_env[env_key]:
            (evaluation if hash_fraction(task.key) < threshold else train).append(task)
    return Split(train=tuple(train), eval=tuple(evaluation), thresholds=thresholds)


def select_subset(tasks: Sequence[Task], size: int, *, seed: int) -> list[Task]:
    """`size` of the tasks, in their order; every env keeps its share, to within a task.

    The subsets of one seed are nested: a smaller one is part of every larger one.
    """
    by_env: dict[str, list[Task]] = defaultdict(list)
    for task in sorted(tasks, key=lambda one: _shuffled_place(one, seed)):
        by_env[task.env_key].append(task)
    # The share of its env that is chosen when a task is: in this order all envs advance alike.
    shares = {
        task.key: (place + 0.5) / len(rows)
        for rows in by_env.values()
        for place, task in enumerate(rows)
    }
    ranked = sorted(tasks, key=lambda one: (shares[one.key], _shuffled_place(one, seed)))
    chosen = {task.key for task in ranked[:size]}
    return [task for task in tasks if task.key in chosen]


def _shuffled_place(task: Task, seed: int) -> tuple[float, str]:
    return hash_fraction(f"{seed}/{task.key}"), task.key


def hash_fraction(key: str) -> float:
    """Map a key to [0, 1): the first eight bytes of its MD5. `hash_fraction("a")` is 0.0498."""
    digest = hashlib.md5(key.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _threshold(env_key: str, n_tasks: int, rule: SplitRule) -> float:
    if env_key in rule.held_out_envs:
        return 1.0
    if env_key in rule.thresholds:
        return rule.thresholds[env_key]
    target = int(n_tasks * rule.eval_fraction)
    if rule.max_eval_tasks is not None:
        target = min(target, rule.max_eval_tasks)
    return target / n_tasks if target >= rule.min_eval_tasks else 0.0
