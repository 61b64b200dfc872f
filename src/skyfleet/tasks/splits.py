"""Splits: the same task always lands on the same side."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from skyfleet.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    eval_fraction: float = 0.02
    held_out_envs: frozenset[str] = frozenset()
    """Evaluated only, never trained on."""
    min_eval_tasks: int = 5
    """An env that would get fewer evaluates none: too few tell nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    train: tuple[Task, ...]
    eval: tuple[Task, ...]


def split_tasks(tasks: Iterable[Task], rule: SplitRule) -> Split:
    """Sides are drawn by a hash of the key, so neither order nor other tasks move a task."""
    by_env: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        by_env[task.env_key].append(task)
    train: list[Task] = []
    held: list[Task] = []
    for env_key, rows in sorted(by_env.items()):
        fraction = _eval_fraction(env_key, len(rows), rule)
        for task in rows:
            (held if _bucket(task.key) < fraction * 10_000 else train).append(task)
    return Split(train=tuple(train), eval=tuple(held))


def _eval_fraction(env_key: str, n_tasks: int, rule: SplitRule) -> float:
    if env_key in rule.held_out_envs:
        return 1.0
    return rule.eval_fraction if n_tasks * rule.eval_fraction >= rule.min_eval_tasks else 0.0


def _bucket(key: str) -> int:
    """0 to 9999, evenly."""
    return int(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest(), 16) % 10_000
