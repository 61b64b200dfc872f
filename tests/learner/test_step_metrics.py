"""The metrics of the updates of a step become one row."""

from __future__ import annotations

import pytest
import torch

from skyfleet.learner.learner import LOGPROB_GAP, StepMetrics


def test_means_are_over_updates_and_extremes_over_all_tokens() -> None:
    metrics = StepMetrics()
    metrics.add({"loss": 1.0}, [{"ratio": torch.tensor([0.0])}, {"ratio": torch.tensor([2.0])}])
    metrics.add({"loss": 3.0}, [{"ratio": torch.tensor([4.0])}])
    assert metrics.compute() == pytest.approx(
        {
            "policy/loss": 2.0,
            "policy/ratio_mean": 2.5,  # of 1 and 4
            "policy/ratio_std": (8 / 3) ** 0.5,  # 0, 2 and 4 lie 2, 0 and 2 from their mean
            "policy/ratio_max": 4.0,
            "policy/ratio_min": 0.0,
        }
    )


def test_the_logprob_gap_is_that_of_the_first_update() -> None:
    metrics = StepMetrics()
    for far in (0.5, 9.0):
        metrics.add({"loss": far}, [{LOGPROB_GAP: torch.tensor([far])}])
    row = metrics.compute()
    assert row[f"policy/{LOGPROB_GAP}_max"] == row[f"policy/{LOGPROB_GAP}_min"] == 0.5
    assert row[f"policy/{LOGPROB_GAP}_std"] == 0.0
