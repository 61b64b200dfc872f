"""An update over several processes has the gradients and metrics of one learner."""

from __future__ import annotations

import pytest
import torch
from tests.fakes.rank_processes import run_ranks
from tests.fakes.sharded_cases import (
    LAYOUTS,
    Outcome,
    build_cases,
    compute_update,
    compute_updates,
    merge_random_adapters,
    relative_errors,
    runs_in,
    update_in_bfloat16,
)

TOLERANCE = 1e-5


def check_equal(ours: Outcome, expected: Outcome) -> None:
    errors = relative_errors(ours.gradients, expected.gradients)
    assert errors
    assert max(errors.values()) < TOLERANCE, max(errors, key=lambda name: errors[name])
    assert ours.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("1", ["plain"]),
        ("2", ["uneven masks", "KL loss", "KL in reward", "critic", "LoRA", "fused"]),
        ("TP 2", ["clipped", "fused, recomputed, LoRA"]),
        ("CP 2", ["critic", "mixture of experts"]),
    ],
)
def test_ranks_compute_the_gradients_of_one_learner(layout: str, cases: list[str]) -> None:
    expected = {name: compute_update(name) for name in cases}
    for outcome in run_ranks(LAYOUTS[layout].world_size, compute_updates, cases, LAYOUTS[layout]):
        for name in cases:
            check_equal(outcome[name], expected[name])


def test_one_rank_computes_the_same_bits() -> None:
    expected = compute_update("plain")
    (outcome,) = run_ranks(1, compute_update, "plain", LAYOUTS["1"])
    assert all(outcome.gradients[n].equal(e) for n, e in expected.gradients.items())
    assert all(outcome.weights[n].equal(e) for n, e in expected.weights.items())
    # The norm sums squares tensor by tensor, and torch's clipping sums norms.
    assert outcome.metrics == pytest.approx(expected.metrics, rel=1e-6)


@pytest.mark.parametrize("layout", ["2", "DP 2 x TP 2"])
def test_adapters_are_merged_on_shards_with_the_rounding_of_one_device(layout: str) -> None:
    expected = merge_random_adapters()
    for weights in run_ranks(LAYOUTS[layout].world_size, merge_random_adapters, LAYOUTS[layout]):
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            # The sum of a product may be rounded in another order.
            different = (weights[name] != weight).float().mean()
            assert different < 0.001, name


def test_bfloat16_weights_have_float32_masters_on_shards() -> None:
    expected, norm = update_in_bfloat16()
    for weights, own_norm in run_ranks(2, update_in_bfloat16, LAYOUTS["2"]):
        assert own_norm == pytest.approx(norm, rel=0.02)
        for name, weight in expected.items():
            assert weights[name].dtype == torch.bfloat16
            # Adam moves each weight by the learning rate, in a direction that rounding may turn.
            torch.testing.assert_close(weights[name], weight, rtol=0.01, atol=3e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_case_is_equal_in_every_layout(layout: str) -> None:
    cases = [name for name in build_cases() if runs_in(name, layout)]
    expected = {name: compute_update(name) for name in cases}
    for outcome in run_ranks(LAYOUTS[layout].world_size, compute_updates, cases, LAYOUTS[layout]):
        for name in cases:
            check_equal(outcome[name], expected[name])
