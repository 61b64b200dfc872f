"""A slow or failing receiver never delays the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from threading import Event

import pytest

from skyfleet.redaction import remember_secrets
from skyfleet.tracking import background
from skyfleet.tracking.background import BackgroundQueue, BackgroundTracker, Pause, RunState
from skyfleet.tracking.step_log import StepLog


def test_items_are_handled_in_order_and_the_rest_at_the_end() -> None:
    handled: list[int] = []
    queue = BackgroundQueue[int]("test", lambda item, _: handled.append(item))
    for item in range(100):
        queue.put(item)
    queue.close()
    assert handled == list(range(100))
    assert queue.n_dropped == 0


def test_what_does_not_fit_is_dropped_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    started, release = Event(), Event()
    handled: list[int] = []

    def wait(item: int, _: Pause) -> None:
        started.set()
        release.wait()
        handled.append(item)

    queue = BackgroundQueue[int]("mlflow", wait, max_items=3)
    queue.put(0)
    started.wait()
    with caplog.at_level(logging.WARNING):
        for item in range(1, 11):
            queue.put(item)
    release.set()
    queue.close()
    assert handled == [0, 1, 2, 3]
    assert queue.n_dropped == 7
    assert [record.getMessage() for record in caplog.records] == [
        "mlflow: not sent: 3 are waiting already; the run goes on, further cases are not reported"
    ]


def test_an_exception_drops_one_item_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handled: list[int] = []

    def handle(item: int, _: Pause) -> None:
        if item < 3:
            raise OSError("no route to host")
        handled.append(item)

    queue = BackgroundQueue[int]("mlflow", handle)
    with caplog.at_level(logging.WARNING):
        for item in range(5):
            queue.put(item)
        queue.close()
    assert handled == [3, 4]
    assert len(caplog.records) == 1
    assert "no route to host" in caplog.text


def test_a_pause_ends_with_the_run_if_it_is_longer_than_the_time_left() -> None:
    paused = Event()
    results: list[bool] = []

    def handle(item: float, pause: Pause) -> None:
        paused.set()
        results.append(pause(item))

    queue = BackgroundQueue[float]("test", handle, drain_seconds=5.0)
    queue.put(0.01)
    queue.put(3600.0)
    paused.wait()
    queue.close()
    assert results == [True, False]


def test_a_receiver_that_hangs_is_left_behind_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    release = Event()

    def hang(item: int, _: Pause) -> None:
        release.wait()

    queue = BackgroundQueue[int]("test", hang, drain_seconds=0.05)
    queue.put(1)
    queue.put(2)
    with caplog.at_level(logging.WARNING):
        queue.close()
    release.set()
    assert "the 0.05 s at the end of the run are over" in caplog.text


class HangingTracker(BackgroundTracker):
    """Its client does not answer until `release`."""

    def __init__(self, release: Event, called: list[str]) -> None:
        super().__init__("test", end_run=called.append)
        self._release, self._called = release, called

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.call(self._hang)

    def finish(self, state: RunState = "finished") -> None:
        self._called.append("finish")
        super().finish(state)

    def close(self) -> None:
        self._called.append("close")
        super().close()

    def _hang(self) -> None:
        self._release.wait()
        self._called.append("row")


def test_trackers_that_hang_delay_no_step_and_share_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "DRAIN_SECONDS", 0.05)
    release, called = Event(), list[str]()
    log = StepLog(HangingTracker(release, called), HangingTracker(release, called))
    for step in range(5):
        log.commit(step)
    log.close()
    assert called == ["finish", "finish", "close", "finish", "close", "finish"]
    release.set()


def test_the_last_call_comes_after_all_others() -> None:
    called: list[int | str] = []
    tracker = BackgroundTracker("test", end_run=called.append)
    for number in range(50):
        tracker.call(partial(called.append, number))
    tracker.finish("failed")
    tracker.call(lambda: called.append(99))
    tracker.close()
    assert called == [*range(50), "failed"]


def test_a_warning_has_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    remember_secrets(["hunter2-hunter2"])

    def fail(state: RunState) -> None:
        raise OSError("no route for hunter2-hunter2 to https://bot:pass-word@host/")

    tracker = BackgroundTracker("test", end_run=fail)
    with caplog.at_level(logging.WARNING):
        tracker.close()
    assert "no route for <redacted" in caplog.text
    assert "hunter2" not in caplog.text
    assert "pass-word" not in caplog.text
