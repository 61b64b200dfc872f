"""`tuned_gc` freezes existing objects and restores the collector, also after a failure."""

from __future__ import annotations

import gc

import pytest

from skyfleet.trainer.training_run import tuned_gc


def fail_inside_tuned_gc(seen: list[object]) -> None:
    with tuned_gc():
        seen += [gc.get_threshold(), gc.get_freeze_count()]
        raise RuntimeError("failed")


def test_a_failed_run_restores_the_garbage_collector() -> None:
    gc.unfreeze()  # another test may have left objects frozen
    before: list[object] = [gc.get_threshold(), gc.get_freeze_count()]
    during: list[object] = []
    with pytest.raises(RuntimeError, match="failed"):
        fail_inside_tuned_gc(during)
    assert [gc.get_threshold(), gc.get_freeze_count()] == before
    assert all(one != other for one, other in zip(before, during, strict=True))
