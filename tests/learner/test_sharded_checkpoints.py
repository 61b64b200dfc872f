"""A checkpoint continues on any number of ranks, with the numbers of an uninterrupted learner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fakes.rank_processes import run_ranks
from tests.fakes.sharded_cases import (
    LAYOUTS,
    Outcome,
    compute_update,
    continue_update,
    relative_errors,
)

from skyfleet.errors import CheckpointError
from skyfleet.learner.process_ranks import RankLayout

TOLERANCE = 1e-5
LAYOUTS_OF = {"one learner": None, "1 rank": RankLayout(), "2 ranks": LAYOUTS["2"]} | {
    "3 ranks": RankLayout(shards=3)
}


def run_update(name: str, layout: RankLayout | None, load: Path | None, save: Path) -> Outcome:
    if layout is None:
        return continue_update(name, None, load, save)
    outcomes: list[Outcome] = run_ranks(
        layout.world_size, continue_update, name, layout, load, save
    )
    return outcomes[0]


def check_resharding(name: str, first: str, second: str, folder: Path) -> None:
    uninterrupted = folder / "uninterrupted"
    uninterrupted.mkdir()
    compute_update(name, save=uninterrupted)
    expected = compute_update(name, load=uninterrupted)
    saved, again = folder / "saved", folder / "again"
    saved.mkdir()
    again.mkdir()
    run_update(name, LAYOUTS_OF[first], None, saved)
    outcome = run_update(name, LAYOUTS_OF[second], saved, again)
    errors = relative_errors(outcome.gradients, expected.gradients)
    # Rounding of the first update is in the weights of the second.
    assert max(errors.values()) < 100 * TOLERANCE
    for weight_name, weight in expected.weights.items():
        torch.testing.assert_close(outcome.weights[weight_name], weight, rtol=0, atol=2e-4)
    assert outcome.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-4)


def test_two_ranks_continue_the_checkpoint_of_one_learner_and_back(tmp_path: Path) -> None:
    for name, first, second in (
        ("critic", "one learner", "2 ranks"),
        ("critic", "2 ranks", "one learner"),
    ):
        folder = tmp_path / first
        folder.mkdir()
        check_resharding(name, first, second, folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("second", LAYOUTS_OF)
@pytest.mark.parametrize("first", LAYOUTS_OF)
@pytest.mark.parametrize("name", ["plain", "LoRA", "critic"])
def test_every_number_of_ranks_continues_every_other(
    name: str, first: str, second: str, tmp_path: Path
) -> None:
    check_resharding(name, first, second, tmp_path)


@pytest.mark.exhaustive
def test_another_tensor_parallel_size_is_one_sentence(tmp_path: Path) -> None:
    run_update("plain", LAYOUTS["TP 2"], None, tmp_path)
    again = run_ranks(2, continue_update, "plain", LAYOUTS["TP 2"], tmp_path, None)
    assert again[0].metrics["policy/grad_norm"] > 0
    with pytest.raises(CheckpointError, match=r"tensor_parallel_size=2, and this run has 1; set"):
        continue_update("plain", None, tmp_path, None)
