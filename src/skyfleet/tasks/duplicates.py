"""Near-duplicate detection: tasks with nearly the same prompt on the same data.

Only tasks with the same grading are compared: two tasks of one template may differ in one word, and
then their verifiers or reference solutions differ too.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from skyfleet.tasks.task import Task

MIN_WORDS = 8
"""Shorter prompts are not compared: every word matters."""
MIN_SIMILARITY = 0.8
"""Jaccard index of the sets of word pairs: about one word in twenty may differ."""

Pair = tuple[str, str]


def find_near_duplicates(tasks: Sequence[Task]) -> dict[int, int]:
    """Map the index of each near-duplicate to the index of the earlier task that it repeats.

    A task that repeats only a dropped duplicate stays.
    """
    by_grading: dict[str, dict[int, frozenset[Pair]]] = defaultdict(dict)
    for index, task in enumerate(tasks):
        words = re.findall(r"\w+", task.prompt.casefold())
        if len(words) >= MIN_WORDS and (task.verifier_code or task.solution):
            by_grading[_grading_key(task)][index] = frozenset(pairwise(words))
    duplicates: dict[int, int] = {}
    for pairs_by_index in by_grading.values():
        if len(pairs_by_index) > 1:
            duplicates |= _compare(pairs_by_index)
    return duplicates


def _grading_key(task: Task) -> str:
    """Equal for tasks with the same data, verifier, reference and numbers in the prompt."""
    row = task.model_dump(mode="json")
    fields = ("env_key", "data_key", "data_version", "env_variables", "verifier_code", "solution")
    numbers = re.findall(r"\d+", task.prompt)
    return json.dumps([numbers, *(row[field] for field in fields)], sort_keys=True)


def _compare(pairs_by_index: dict[int, frozenset[Pair]]) -> dict[int, int]:
    """Two similar sets share one of their few rarest pairs: only those are looked up.

    The prefix filter of Chaudhuri, Ganti and Kaushik (2006): exact, and fast for many tasks.
    """
    frequency = Counter(pair for pairs in pairs_by_index.values() for pair in pairs)
    kept_with: dict[Pair, list[int]] = defaultdict(list)
    duplicates: dict[int, int] = {}
    for index, pairs in pairs_by_index.items():
        rarest = sorted(pairs, key=lambda pair: (frequency[pair], pair))
        rarest = rarest[: len(pairs) - ceil(MIN_SIMILARITY * len(pairs)) + 1]
        candidates = sorted({other for pair in rarest for other in kept_with[pair]})
        for other in candidates:
            others = pairs_by_index[other]
            if len(pairs & others) >= MIN_SIMILARITY * len(pairs | others):
                duplicates[index] = other
                break
        else:
            for pair in rarest:
                kept_with[pair].append(index)
    return duplicates
