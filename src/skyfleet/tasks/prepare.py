"""Prepare a dataset: raw rows -> train and validation tasks, and the reason for each dropped row.

The steps are Fleet's, in their order: filter, limit, drop quarantined rows and duplicates, split,
cap the evaluation tasks, cap each env's share of the training tasks.
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
from skyfleet.tasks.duplicates import find_near_duplicates
from skyfleet.tasks.splits import SplitRule, hash_fraction, split_tasks
from skyfleet.tasks.task import Modality, Task

MIN_EVAL_PROMPTS_PER_ENV = 4
"""Minimum that every env keeps, even if the total is then above the evaluation cap."""

DropReason = Literal[
    "key again",
    "same prompt",
    "nearly the same prompt",
    "quarantined",
    "evaluation cap",
    "share cap",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Options of `prepare`; None disables an option."""

    modality: Modality | None = "tool_use"
    env_filter: tuple[str, ...] = ()
    difficulty_filter: tuple[int, ...] = ()
    max_tasks: int | None = None
    split: SplitRule = field(default_factory=SplitRule)
    max_eval_prompts: int | None = None
    max_env_ratio: float | None = None
    """Limit of an env's tasks, as a share of all training tasks before the cap. Its share of the
    remaining tasks may be larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDataset:
    train: tuple[Task, ...]
    validation: tuple[Task, ...]
    thresholds: dict[str, float]
    dropped: dict[str, DropReason]
    """Reason by dropped row, such as `row 7 (task_x)`."""


def prepare(
    rows: Iterable[tuple[int, Task]],
    options: PrepareOptions,
    *,
    in_quarantine: Callable[[Task], bool] = lambda _: False,
) -> PreparedDataset:
    """Prepare train and validation tasks; TaskError if none is left to train on.

    Envs too small to evaluate are only trained on, so validation may be empty (`explain_no_validation`).
    """
    dropped: dict[str, DropReason] = {}
    chosen = _filter(list(rows), options)
    # Before duplicates, or a corrected row would be dropped as the duplicate of a faulty one.
    dropped |= {_row(n, task): "quarantined" for n, task in chosen if in_quarantine(task)}
    chosen = _unique([row for row in chosen if _row(*row) not in dropped], dropped)
    numbers = {task.key: number for number, task in chosen}
    split = split_tasks((task for _, task in chosen), options.split)
    validation = _cap_eval(split.eval, options.max_eval_prompts)
    train = _cap_shares(split.train, options.max_env_ratio)
    caps: list[tuple[DropReason, tuple[Task, ...], tuple[Task, ...]]] = [
        ("evaluation cap", split.eval, validation),
        ("share cap", split.train, train),
    ]
    for cap, before, after in caps:
        kept = {task.key for task in after}
        dropped |= {_row(numbers[t.key], t): cap for t in before if t.key not in kept}
    _check_train(train, validation, options, Counter(dropped.values()))
    thresholds = dict(split.thresholds)
    return PreparedDataset(
        train=train, validation=validation, thresholds=thresholds, dropped=dropped
    )


def explain_no_validation(prepared: PreparedDataset, rule: SplitRule) -> str | None:
    """Why no task is left to evaluate, and what would change it; None if there are some."""
    if prepared.validation:
        return None
    largest, n_tasks = Counter(task.env_key for task in prepared.train).most_common(1)[0]
    return (
        f"all tasks are trained on and none is evaluated: of {n_tasks} {largest} tasks --eval-ratio "
        f"{rule.eval_fraction:g} selects {int(n_tasks * rule.eval_fraction)}, and an environment needs "
        f"at least {rule.min_eval_tasks}; raise it, or hold out an environment"
    )


def fingerprint(task: Task) -> str:
    """Equal for tasks with the same prompt on the same data, ignoring case and punctuation.

    Another seed database, user, chat history or ground truth makes another task.
    """
    where = [task.env_key, task.data_key, task.data_version, task.env_variables]
    history = [[message["role"], normalize_words(message["content"])] for message in task.messages]
    parts: list[object] = [normalize_words(task.prompt), *where]
    parts += [part for part in (history, _ground_truth(task)) if part]
    return json.dumps(parts, sort_keys=True)


def normalize_words(text: str) -> str:
    """`normalize_words("Close  issue #4!")` is "close issue 4"."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _ground_truth(task: Task) -> dict[str, object]:
    """SkyRL's columns that distinguish tasks with the same prompt, without the row's position."""
    truth = {name: task.metadata[name] for name in ("reward_spec",) if name in task.metadata}
    extra_info = task.metadata.get("extra_info")
    if isinstance(extra_info, dict):
        truth |= {name: extra_info[name] for name in extra_info.keys() - {"index", "split"}}
    return truth


def _row(number: int, task: Task) -> str:
    return f"row {number} ({task.key})"


def _filter(rows: list[tuple[int, Task]], options: PrepareOptions) -> list[tuple[int, Task]]:
    if options.env_filter:
        known = {task.env_key for _, task in rows}
        if unknown := sorted(set(options.env_filter) - known):
            raise TaskError(
                f"env_filter names {unknown[0]!r}, which has no task; choose from {sorted(known)}"
            )
    kept = [
        (number, task)
        for number, task in rows
        if options.modality in (None, task.modality)
        and (not options.env_filter or task.env_key in options.env_filter)
        and (not options.difficulty_filter or task.difficulty in options.difficulty_filter)
    ]
    if not kept:
        there = Counter((task.env_key, task.modality, task.difficulty) for _, task in rows)
        shown = ", ".join(
            f"{n} x {env} {mod} {diff}" for (env, mod, diff), n in there.most_common(3)
        )
        raise TaskError(
            f"no task has modality={options.modality or 'all'}, env_filter={list(options.env_filter)}, "
            f"difficulty_filter={list(options.difficulty_filter)}; most rows are {shown}"
        )
    return kept[: options.max_tasks]


def _unique(
    rows: Sequence[tuple[int, Task]], dropped: dict[str, DropReason]
) -> list[tuple[int, Task]]:
    """Keep the first row of each key, of each fingerprint and of each set of near-duplicates."""
    by_key: dict[str, tuple[int, Task]] = {}
    prints: set[str] = set()
    kept = []
    for number, task in rows:
        first, same = by_key.setdefault(task.key, (number, task))
        if same != task:
            raise TaskError(
                f"row {number}: key={task.key!r} is already row {first} with other content; "
                "give every task its own key"
            )
        if first != number:
            dropped[_row(number, task)] = "key again"
        elif (mark := fingerprint(task)) in prints:
            dropped[_row(number, task)] = "same prompt"
        else:
            prints.add(mark)
            kept.append((number, task))
    duplicates = find_near_duplicates([task for _, task in kept])
    dropped |= {_row(*kept[index]): "nearly the same prompt" for index in duplicates}
    return [row for index, row in enumerate(kept) if index not in duplicates]


def _cap_eval(tasks: tuple[Task, ...], most: int | None) -> tuple[Task, ...]:
    """Keep a minimum per env, then add tasks round-robin, in the order of the keys' hashes."""
    if most is None or len(tasks) <= most:
        return tasks
    queues = _by_hash(tasks)
    kept = {t.key for queue in queues for t in queue[:MIN_EVAL_PROMPTS_PER_ENV]}
    for turn in zip_longest(*(queue[MIN_EVAL_PROMPTS_PER_ENV:] for queue in queues)):
        for task in filter(None, turn):
            if len(kept) < most:
                kept.add(task.key)
    return _only(tasks, kept)


def _cap_shares(tasks: tuple[Task, ...], ratio: float | None) -> tuple[Task, ...]:
    """Apply Fleet's rule: a share of the tasks before the cap, since with few envs a share of the
    remaining tasks cannot be met."""
    if ratio is None or not tasks:
        return tasks
    most = int(ratio * len(tasks))
    if most == 0:
        raise TaskError(
            f"max_env_ratio={ratio} of {len(tasks)} training tasks is less than one task; "
            f"set at least {ceil(100 / len(tasks)) / 100}, or omit it"
        )
    return _only(tasks, {t.key for queue in _by_hash(tasks) for t in queue[:most]})


def _by_hash(tasks: Iterable[Task]) -> list[list[Task]]:
    """Each env's tasks in the order of their keys' hashes; envs by name."""
    by_env: dict[str, list[Task]] = defaultdict(list)
    for task in sorted(tasks, key=lambda one: hash_fraction(one.key)):
        by_env[task.env_key].append(task)
    return [by_env[env_key] for env_key in sorted(by_env)]


def _only(tasks: Iterable[Task], keys: Collection[str]) -> tuple[Task, ...]:
    return tuple(task for task in tasks if task.key in keys)


def _check_train(
    train: Sequence[Task],
    validation: Sequence[Task],
    options: PrepareOptions,
    dropped: Counter[DropReason],
) -> None:
    rule = options.split
    if not train and not validation:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        raise TaskError(
            f"no task is left to train on: every row was dropped ({reasons}); `skyfleet tasks "
            "validate` shows the fault of each quarantined row, and --quarantine names another file"
        )
    if not train:
        held_out = sorted({task.env_key for task in validation})
        raise TaskError(
            f"no task is left to train on: every env with tasks is only evaluated on, {held_out}; "
            f"held_out={sorted(rule.held_out_envs)}, hold out fewer"
        )
