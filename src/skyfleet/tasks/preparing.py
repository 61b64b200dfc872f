"""Prepare: raw rows -> the tasks to train on and to measure with, and why the others are neither.

The steps are Fleet's, in their order: filter, take the first, drop what is in quarantine or there
twice, split, cap the evaluation, cap each env's share of the training.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import ceil
from typing import Literal

from skyfleet.errors import TaskError
from skyfleet.tasks.duplicates import near_twins
from skyfleet.tasks.splits import SplitRule, place, split_tasks
from skyfleet.tasks.task import Modality, Task

MIN_EVAL_PROMPTS_PER_ENV = 4
"""What the evaluation cap leaves every env, even where that is more than the cap."""

Dropped = Literal[
    "key again",
    "same prompt",
    "nearly the same prompt",
    "quarantined",
    "evaluation cap",
    "share cap",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """What is asked for; None asks for nothing."""

    modality: Modality | None = "tool_use"
    env_filter: tuple[str, ...] = ()
    difficulty_filter: tuple[int, ...] = ()
    max_tasks: int | None = None
    split: SplitRule = field(default_factory=SplitRule)
    max_eval_prompts: int | None = None
    max_env_ratio: float | None = None
    """No env has more tasks than this share of all there were to train on. Once the others are left
    out, its share of the rest may be larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    train: tuple[Task, ...]
    validation: tuple[Task, ...]
    thresholds: dict[str, float]
    dropped: dict[str, Dropped]
    """Which rows were left out by what, as `row 7 (task_x)`."""


def prepare(
    rows: Iterable[tuple[int, Task]],
    asked: Preparing,
    *,
    in_quarantine: Callable[[Task], bool] = lambda _: False,
) -> Prepared:
    """TaskError where nothing would be left to train on or to measure with."""
    dropped: dict[str, Dropped] = {}
    chosen = _filtered(list(rows), asked)
    # Before what is there twice, or a mended row would go as the repetition of a bad one.
    dropped |= {_row(n, task): "quarantined" for n, task in chosen if in_quarantine(task)}
    chosen = _unique([row for row in chosen if _row(*row) not in dropped], dropped)
    numbers = {task.key: number for number, task in chosen}
    split = split_tasks((task for _, task in chosen), asked.split)
    validation = _cap_eval(split.eval, asked.max_eval_prompts)
    train = _cap_shares(split.train, asked.max_env_ratio)
    caps: list[tuple[Dropped, tuple[Task, ...], tuple[Task, ...]]] = [
        ("evaluation cap", split.eval, validation),
        ("share cap", split.train, train),
    ]
    for cap, before, after in caps:
        kept = {task.key for task in after}
        dropped |= {_row(numbers[t.key], t): cap for t in before if t.key not in kept}
    _check_sides(train, validation, asked)
    thresholds = dict(split.thresholds)
    return Prepared(train=train, validation=validation, thresholds=thresholds, dropped=dropped)


def fingerprint(task: Task) -> str:
    """Equal for tasks that ask the same of the same data, letter case and punctuation aside.

    Another seed database or another user makes another task of the same words.
    """
    where = [task.env_key, task.data_key, task.data_version, task.env_variables]
    return json.dumps([words(task.prompt), *where], sort_keys=True)


def words(text: str) -> str:
    """`words("Close  issue #4!")` is "close issue 4"."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _row(number: int, task: Task) -> str:
    return f"row {number} ({task.key})"


def _filtered(rows: list[tuple[int, Task]], asked: Preparing) -> list[tuple[int, Task]]:
    if asked.env_filter:
        known = {task.env_key for _, task in rows}
        if unknown := sorted(set(asked.env_filter) - known):
            raise TaskError(
                f"env_filter names {unknown[0]!r}, of which there is no task; "
                f"choose from {sorted(known)}"
            )
    kept = [
        (number, task)
        for number, task in rows
        if asked.modality in (None, task.modality)
        and (not asked.env_filter or task.env_key in asked.env_filter)
        and (not asked.difficulty_filter or task.difficulty in asked.difficulty_filter)
    ]
    if not kept:
        there = Counter((task.env_key, task.modality, task.difficulty) for _, task in rows)
        shown = ", ".join(
            f"{n} x {env} {mod} {diff}" for (env, mod, diff), n in there.most_common(3)
        )
        raise TaskError(
            f"no task has modality={asked.modality or 'all'}, env_filter={list(asked.env_filter)}, "
            f"difficulty_filter={list(asked.difficulty_filter)}; most rows are {shown}"
        )
    return kept[: asked.max_tasks]


def _unique(
    rows: Sequence[tuple[int, Task]], dropped: dict[str, Dropped]
) -> list[tuple[int, Task]]:
    """The first row of each key, of each fingerprint, and of those that nearly repeat each other."""
    by_key: dict[str, tuple[int, Task]] = {}
    prints: set[str] = set()
    kept = []
    for number, task in rows:
        first, same = by_key.setdefault(task.key, (number, task))
        if same != task:
            raise TaskError(
                f"row {number}: key={task.key!r} is already row {first}, with other content; "
                "give every task its own key"
            )
        if first != number:
            dropped[_row(number, task)] = "key again"
        elif (mark := fingerprint(task)) in prints:
            dropped[_row(number, task)] = "same prompt"
        else:
            prints.add(mark)
            kept.append((number, task))
    twins = near_twins([task for _, task in kept])
    dropped |= {_row(*kept[place]): "nearly the same prompt" for place in twins}
    return [row for place, row in enumerate(kept) if place not in twins]


def _cap_eval(tasks: tuple[Task, ...], most: int | None) -> tuple[Task, ...]:
    """A few of every env, then one of each in turn, those first whose keys come first."""
    if most is None or len(tasks) <= most:
        return tasks
    queues = _by_place(tasks)
    kept = {t.key for queue in queues for t in queue[:MIN_EVAL_PROMPTS_PER_ENV]}
    for in_turn in zip_longest(*(queue[MIN_EVAL_PROMPTS_PER_ENV:] for queue in queues)):
        for task in filter(None, in_turn):
            if len(kept) < most:
                kept.add(task.key)
    return _only(tasks, kept)


def _cap_shares(tasks: tuple[Task, ...], ratio: float | None) -> tuple[Task, ...]:
    """Fleet's rule: a share of what was there before, since with few envs nothing else is left."""
    if ratio is None or not tasks:
        return tasks
    most = int(ratio * len(tasks))
    if most == 0:
        raise TaskError(
            f"max_env_ratio={ratio} of {len(tasks)} training tasks is less than one task; "
            f"give at least {ceil(100 / len(tasks)) / 100}, or leave it out"
        )
    return _only(tasks, {t.key for queue in _by_place(tasks) for t in queue[:most]})


def _by_place(tasks: Iterable[Task]) -> list[list[Task]]:
    """Each env's tasks by the place of their key; envs by name."""
    by_env: dict[str, list[Task]] = defaultdict(list)
    for task in sorted(tasks, key=lambda one: place(one.key)):
        by_env[task.env_key].append(task)
    return [by_env[env_key] for env_key in sorted(by_env)]


def _only(tasks: Iterable[Task], keys: Collection[str]) -> tuple[Task, ...]:
    return tuple(task for task in tasks if task.key in keys)


def _check_sides(train: Sequence[Task], validation: Sequence[Task], asked: Preparing) -> None:
    rule = asked.split
    if not train:
        raise TaskError(
            "no task is left to train on: every env is held out or every row was dropped; "
            f"held out are {sorted(rule.held_out_envs)}"
        )
    if not validation:
        largest, n_tasks = Counter(task.env_key for task in train).most_common(1)[0]
        raise TaskError(
            f"no task is left to measure with: of {n_tasks} {largest} tasks eval_ratio="
            f"{rule.eval_fraction} makes {int(n_tasks * rule.eval_fraction)}, and "
            f"{rule.min_eval_tasks} are the fewest that tell something; raise it, or hold an env out"
        )
