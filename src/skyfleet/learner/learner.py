"""Learner: the interface of a learner, its step report and the metrics of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from skyfleet.algorithms.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    policy_version: int
    metrics: Mapping[str, float]
    samples: Sequence[Sample] = ()
    """The samples trained on, if the learner computed their advantages: KL in reward, or a critic."""


class Learner(Protocol):
    policy_version: int

    @property
    def is_within_update(self) -> bool:
        """The weights have changed, and the step has not ended: it failed."""
        ...

    async def step(self, samples: Sequence[Sample]) -> StepReport:
        """Update the policy on one batch of samples with advantages."""
        ...

    async def sft_step(self, samples: Sequence[Sample]) -> StepReport:
        """Take one supervised step on demonstrations."""
        ...

    def renew_reference(self) -> None:
        """Load the KL reference anew before the next step, from the checkpoint that is now it."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole weight of the policy by its Hugging Face name, with adapters merged.

        A weight is valid until the next one is asked for: a sharded learner gathers them in turn.
        """
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


LOGPROB_GAP = "rollout_train_logprobs_abs_diff"
"""|learner logprob - engine logprob| on the first mini-batch. The extremes show single outliers."""


class StepMetrics:
    """Collects the metrics of the updates of one step."""

    def __init__(self) -> None:
        self._updates: dict[str, list[float]] = defaultdict(list)
        # Values, not their summaries: the deviation is over all tokens of the step.
        self._stats: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, metrics: Mapping[str, float], stats: Sequence[Mapping[str, Tensor]]) -> None:
        """The metrics of one update, and per-token values of each of its micro-batches."""
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for micro_batch in stats:
            for name, values_N in micro_batch.items():
                parts[name].append(values_N.float())
        if self._updates:
            # After an update the gap measures how far the policy moved, not how well they agree.
            parts.pop(LOGPROB_GAP, None)
        for name, micro_batches in parts.items():
            self._stats[name].append(torch.cat(micro_batches))
        for name, value in metrics.items():
            self._updates[name].append(value)

    def compute(self) -> dict[str, float]:
        """`policy/*`: means over updates; deviations and extremes over all tokens of the step."""
        metrics = {name: sum(values) / len(values) for name, values in self._updates.items()}
        for name, updates in self._stats.items():
            metrics |= _summarize(name, updates)
        return {f"policy/{name}": value for name, value in metrics.items()}


def _summarize(name: str, updates: Sequence[Tensor]) -> dict[str, float]:
    values_N = torch.cat(list(updates))
    summary = {
        "mean": torch.stack([update_N.mean() for update_N in updates]).mean(),
        "std": values_N.std(correction=0),  # 0 for a single token
        "max": values_N.max(),
        "min": values_N.min(),
    }
    numbers: list[float] = torch.stack(list(summary.values())).tolist()
    return {f"{name}_{which}": x for which, x in zip(summary, numbers, strict=True)}
