"""Splits: which tasks are trained on and which are only measured, by a hash of their keys."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    """An env that would get fewer evaluates none: too few tell nothing."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Envs named here are split at this threshold whatever their size, so that no task changes
    side when others come or go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    train: tuple[Task, ...]
    eval: tuple[Task, ...]
    thresholds: Mapping[str, float]
    """For each env: a task is evaluated where the place of its key is below."""


def split_tasks(tasks: Iterable[Task], rule: SplitRule) -> Split:
    """Each env apart. Order moves no task; the number of an env's tasks can, unless
    `rule.thresholds` holds it fast."""
    by_env: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        by_env[task.env_key].append(task)
    thresholds = {env: _threshold(env, len(rows), rule) for env, rows in sorted(by_env.items())}
    train: list[Task] = []
    held: list[Task] = []
    for env_key, threshold in thresholds.items():
        for task in by_env[env_key]:
            (held if place(task.key) < threshold else train).append(task)
    return Split(train=tuple(train), eval=tuple(held), thresholds=thresholds)


def place(key: str) -> float:
    """From 0 to 1, evenly: the first eight bytes of the key's MD5. `place("a")` is 0.0498."""
    digest = hashlib.md5(key.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _threshold(env_key: str, n_tasks: int, rule: SplitRule) -> float:
    if env_key in rule.held_out_envs:
        return 1.0
    if env_key in rule.thresholds:
        return rule.thresholds[env_key]
    target = int(n_tasks * rule.eval_fraction)
    return target / n_tasks if target >= rule.min_eval_tasks else 0.0
