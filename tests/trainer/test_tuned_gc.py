"""What was set up is kept out of the collector's sight until the run ends, however it ends."""

from __future__ import annotations

import gc

import pytest

from skyfleet.trainer.training_run import tuned_gc


def fail_while_settled(seen: list[object]) -> None:
    with tuned_gc():
        seen += [gc.get_threshold(), gc.get_freeze_count()]
        raise RuntimeError("failed")


def test_the_collector_is_as_it_was_when_a_run_fails() -> None:
    before: list[object] = [gc.get_threshold(), gc.get_freeze_count()]
    during: list[object] = []
    with pytest.raises(RuntimeError, match="failed"):
        fail_while_settled(during)
    assert [gc.get_threshold(), gc.get_freeze_count()] == before
    assert all(one != other for one, other in zip(before, during, strict=True))
