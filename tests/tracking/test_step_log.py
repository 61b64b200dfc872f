from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from skyfleet.tracking.step_log import StepLog


class ListTracker:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None: ...


def test_what_everyone_added_is_one_row_in_every_tracker() -> None:
    one, two = ListTracker(), ListTracker()
    log = StepLog(one, two)
    log.add({"a": 1.0})
    log.add({"b": 2.0})
    log.commit(1)
    log.add({"a": 3.0})
    log.commit(4)
    assert one.rows == two.rows == [(1, {"a": 1.0, "b": 2.0}), (4, {"a": 3.0})]


def test_a_key_twice_in_a_step_raises() -> None:
    log = StepLog(ListTracker())
    log.add({"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match=r"logged twice in one step: \['b'\]"):
        log.add({"b": 2.0})


@pytest.mark.parametrize("step", [2, 3])
def test_a_step_back_raises(step: int) -> None:
    log = StepLog(ListTracker())
    log.commit(3)
    with pytest.raises(ValueError, match=f"step {step} after step 3"):
        log.commit(step)


def test_a_timed_block_adds_its_seconds_even_when_it_fails() -> None:
    tracker = ListTracker()
    log = StepLog(tracker)

    def fail() -> None:
        with log.timed("rollout"):
            time.sleep(0.02)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    log.commit(1)
    ((_, metrics),) = tracker.rows
    assert 0.02 <= metrics["timing/rollout"] < 1.0
