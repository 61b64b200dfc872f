"""Near: tasks that ask the same of the same data in nearly the same words.

Only tasks that are judged alike are compared: two of one template may differ in a single word and be
two tasks, and then their verifiers or their references differ, too.
"""

from __future__ import annotations
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from skyfleet.tasks.task import Task


FEWEST_WORDS = 8
"""In shorter prompts every word counts."""
NEAR = 0.8
"""Jaccard's index of the sets of word pairs: one word of twenty may be another."""

Pair = tuple[str, str]


def near_twins(tasks: Sequence[Task]) -> dict[int, int]:
    """By its place, each task that nearly repeats an earlier one, with the place of that one.

    What repeats nothing but a repetition stays.
    """
    alike: dict[str, dict[int, frozenset[Pair]]] = defaultdict(dict)
    for place, task in enumerate(tasks):
        said = re.findall(r"\w+", task.prompt.casefold())
        if len(said) >= FEWEST_WORDS and (task.verifier_code or task.solution):
            alike[_judged(task)][place] = frozenset(pairwise(said))
    twins: dict[int, int] = {}
    for pairs_by_place in alike.values():
        if len(pairs_by_place) > 1:
            twins |= _twins(pairs_by_place)
    return twins


def _judged(task: Task) -> str:
    """Equal for tasks with the same data, verifier and reference, and with the same numbers."""
    row = task.model_dump(mode="json")
    fields = ("env_key", "data_key", "data_version", "env_variables", "verifier_code", "solution")
    numbers = re.findall(r"\d+", task.prompt)
    return json.dumps([numbers, *(row[field] for field in fields)], sort_keys=True)


def _twins(pairs_by_place: dict[int, frozenset[Pair]]) -> dict[int, int]:
    """Two sets that are near share one of their few rarest pairs: only those are looked up.

    The prefix filter of Chaudhuri, Ganti and Kaushik (2006): exact, and fast for many tasks.
    """
    seldom = Counter(pair for pairs in pairs_by_place.values() for pair in pairs)
    kept_with: dict[Pair, list[int]] = defaultdict(list)
    twins: dict[int, int] = {}
    for place, pairs in pairs_by_place.items():
        rarest = sorted(pairs, key=lambda pair: (seldom[pair], pair))
        rarest = rarest[: len(pairs) - ceil(NEAR * len(pairs)) + 1]
        candidates = sorted({other for pair in rarest for other in kept_with[pair]})
        for other in candidates:
            others = pairs_by_place[other]
            if len(pairs & others) >= NEAR * len(pairs | others):
                twins[place] = other
                break
        else:
            for pair in rarest:
                kept_with[pair].append(place)
    return twins
