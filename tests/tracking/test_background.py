"""A slow or failing receiver never delays the run."""

from __future__ import annotations

import logging
from threading import Event

import pytest

from skyfleet.tracking.background import BackgroundQueue, Pause


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
