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

    def sync(self) -> None: ...

    def close(self) -> None: ...


def test_all_metrics_of_a_step_are_one_row_in_every_tracker() -> None:
    one, two = ListTracker(), ListTracker()
    log = StepLog(one, two)
    log.add({"a": 1.0})
    log.add({"b": 2.0})
    log.commit(1)
    log.add({"a": 3.0})
    log.commit(4)
    assert one.rows == two.rows == [(1, {"a": 1.0, "b": 2.0}), (4, {"a": 3.0})]


def test_the_same_key_twice_in_a_step_raises() -> None:
    log = StepLog(ListTracker())
    log.add({"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match=r"logged twice in one step: \['b'\]"):
        log.add({"b": 2.0})


@pytest.mark.parametrize("step", [2, 3])
def test_a_step_that_does_not_increase_raises(step: int) -> None:
    log = StepLog(ListTracker())
    log.commit(3)
    with pytest.raises(ValueError, match=f"step {step} after step 3"):
        log.commit(step)


def test_a_timed_block_that_raises_still_adds_its_seconds() -> None:
    tracker = ListTracker()
    log = StepLog(tracker)

    def fail() -> None:
        with log.timed("sync_weights"):
            time.sleep(0.02)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    log.commit(1)
    ((_, metrics),) = tracker.rows
    assert 0.02 <= metrics["timing/sync_weights"] < 1.0


def test_a_phase_that_runs_twice_adds_up() -> None:
    tracker = ListTracker()
    log = StepLog(tracker)
    log.add({"timing/save_hf_model": 2.0})
    with log.timed("save_hf_model"):
        pass
    log.commit(1)
    assert 2.0 < tracker.rows[0][1]["timing/save_hf_model"] < 3.0


def test_phases_are_logged_under_skyrls_names_with_the_time_of_the_step() -> None:
    tracker = ListTracker()
    log = StepLog(tracker)
    with log.timed("save_checkpoints"):
        time.sleep(0.05)
    for phase in ("rollout", "learn", "sync_weights"):
        with log.timed(phase):
            time.sleep(0.01)
    with log.timed("eval"):
        time.sleep(0.05)
    log.commit(1)
    ((_, metrics),) = tracker.rows
    phases = ("generate", "train_critic_and_policy", "sync_weights")
    assert metrics.keys() == {
        f"timing/{name}" for name in (*phases, "step", "eval", "save_checkpoints")
    }
    # Evaluations and checkpoints are not part of the step.
    total = sum(metrics[f"timing/{name}"] for name in phases)
    assert total <= metrics["timing/step"] < total + metrics["timing/eval"]


def test_a_row_without_generation_has_no_step_time() -> None:
    tracker = ListTracker()
    log = StepLog(tracker)
    with log.timed("eval"):
        pass
    log.commit(0)
    assert tracker.rows[0][1].keys() == {"timing/eval"}


def test_a_step_generated_by_an_earlier_process_takes_the_sum_of_its_phases() -> None:
    tracker = ListTracker()
    log = StepLog(tracker)
    log.add({"timing/generate": 2.0, "timing/train_critic_and_policy": 3.0})
    log.add({"timing/sentinels": 0.5, "timing/eval": 7.0, "loss/num_samples": 8.0})
    log.commit(4)
    assert tracker.rows[0][1]["timing/step"] == 5.5
