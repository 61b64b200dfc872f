from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from skyfleet.tracking.jsonl import JsonlTracker


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def run(folder: Path, steps: range, *, resume_step: int | None = None) -> None:
    tracker = JsonlTracker(folder, resume_step=resume_step)
    for step in steps:
        tracker.log({"reward": step / 10, "timing/step": 0.5}, step)
    tracker.close()


def test_a_row_is_sorted_exact_and_free_of_timing(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "run", resume_step=None)
    tracker.log({"b": 0.1 + 0.2, "timing/learn": 1.5, "a": 3, "timing/a": 2.0}, 7)
    # Flushed: readable before the tracker is closed.
    assert lines(tmp_path / "run" / "metrics.jsonl") == [
        '{"step": 7, "a": 3.0, "b": 0.30000000000000004}'
    ]
    assert lines(tmp_path / "run" / "timing.jsonl") == [
        '{"step": 7, "timing/a": 2.0, "timing/learn": 1.5}'
    ]
    tracker.close()


def test_a_resumed_run_has_the_bytes_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    run(tmp_path / "whole", range(1, 7))
    run(tmp_path / "resumed", range(1, 6))
    run(tmp_path / "resumed", range(4, 7), resume_step=3)
    for name in ("metrics.jsonl", "timing.jsonl"):
        whole, resumed = tmp_path / "whole" / name, tmp_path / "resumed" / name
        assert whole.read_bytes() == resumed.read_bytes()


def test_a_torn_last_line_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        run(tmp_path, range(3, 5), resume_step=3)
    assert [json.loads(line)["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert "dropped a line that is not whole" in caplog.text


def test_a_fresh_run_starts_its_files_afresh(tmp_path: Path) -> None:
    run(tmp_path, range(1, 4))
    run(tmp_path, range(1, 2))
    assert lines(tmp_path / "metrics.jsonl") == ['{"step": 1, "reward": 0.1}']


def test_what_json_has_no_word_for_is_null_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = JsonlTracker(tmp_path, resume_step=None)
    with caplog.at_level(logging.WARNING):
        tracker.log({"kl": math.nan, "loss": math.inf}, 1)
        tracker.log({"kl": -math.inf}, 2)
    tracker.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        '{"step": 1, "kl": null, "loss": null}',
        '{"step": 2, "kl": null}',
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "step 1: kl is nan, written as null (said once)"
    ]
