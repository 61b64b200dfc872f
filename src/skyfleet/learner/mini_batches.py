"""Mini-batches: a step's samples, cut into what one optimiser step each learns from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from skyfleet.algorithms.sample import Sample


def mini_batches(samples: Sequence[Sample], prompts: int) -> list[list[Sample]]:
    """Runs of at most `prompts` tasks, every sample of a task in one; no run is much shorter.

    A filter may leave 33 tasks: `[11, 11, 11]` and not `[16, 16, 1]`, where one task would move the
    policy as far as sixteen.
    """
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task_key, []).append(sample)
    groups, n_runs = list(by_task.values()), ceil(len(by_task) / prompts)
    ends = [ceil(len(groups) * run / n_runs) for run in range(1, n_runs + 1)]
    return [
        [sample for group in groups[start:end] for sample in group]
        for start, end in pairwise([0, *ends])
    ]
