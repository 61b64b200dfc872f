"""StepMetrics: what the updates of one step tell, put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

GAP = "rollout_train_logprobs_abs_diff"
"""Engine to learner, of the first mini-batch. One token far off hardly shows in a mean."""


class StepMetrics:
    def __init__(self) -> None:
        self._reports: dict[str, list[float]] = defaultdict(list)
        # Values, not numbers: a deviation is over all of the step.
        self._spreads: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, report: Mapping[str, float], spreads: Sequence[Mapping[str, Tensor]]) -> None:
        """An update's numbers, and the values per token of each of its micro-batches."""
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for micro_batch in spreads:
            for name, values_N in micro_batch.items():
                parts[name].append(values_N.float())
        if self._reports:
            # After an update the gap says how far the policy moved, not how well they agree.
            parts.pop(GAP, None)
        for name, cut in parts.items():
            self._spreads[name].append(torch.cat(cut))
        for name, value in report.items():
            self._reports[name].append(value)

    def told(self) -> dict[str, float]:
        """Means are over updates; deviations and extremes over all tokens of the step."""
        metrics = {name: sum(values) / len(values) for name, values in self._reports.items()}
        for name, updates in self._spreads.items():
            metrics |= _spread(name, updates)
        return {f"policy/{name}": value for name, value in metrics.items()}


def _spread(name: str, updates: Sequence[Tensor]) -> dict[str, float]:
    values_N = torch.cat(list(updates))
    told = {
        "mean": torch.stack([update_N.mean() for update_N in updates]).mean(),
        "std": values_N.std(correction=0),  # of a single token 0
        "max": values_N.max(),
        "min": values_N.min(),
    }
    numbers: list[float] = torch.stack(list(told.values())).tolist()
    return {f"{name}_{which}": x for which, x in zip(told, numbers, strict=True)}
