"""A tracker that fails during a run is one warning."""

from __future__ import annotations

import logging

import pytest

from skyfleet.tracking.outage_guard import OutageGuard


def test_an_exception_is_logged_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    guard = OutageGuard("W&B")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with guard:
                raise BrokenPipeError("the service is gone")
    assert [record.getMessage() for record in caplog.records] == [
        "W&B: not stored: BrokenPipeError: the service is gone; the run goes on, further cases are "
        "not reported"
    ]


def test_an_interruption_is_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), OutageGuard("W&B"):
        raise KeyboardInterrupt
