from __future__ import annotations

import logging
from pathlib import Path

import pytest

from skyfleet.storage.step_rows import find_missing, read_last_step, truncate_rows


def test_rows_of_replayed_steps_and_half_lines_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 2, "a": 1}\n{"step": 2}\n{"step": 3}\n\0\0\n{"st')
    assert read_last_step(path) == 3
    with caplog.at_level(logging.WARNING):
        assert [row["step"] for row in truncate_rows(path, 2)] == [0, 2, 2]
    assert path.read_bytes() == b'{"step": 0}\n{"step": 2, "a": 1}\n{"step": 2}\n'
    assert len(caplog.records) == 2
    assert truncate_rows(path, -1) == []
    assert path.read_bytes() == b""
    assert read_last_step(path) is None
    assert read_last_step(tmp_path / "none") is None


def test_the_last_row_of_a_step_stays_where_a_step_has_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "by": "lost"}\n{"step": 1}\n{"step": 2}\n')
    assert truncate_rows(path, 2, one_per_step=True) == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    assert "dropped 1 rows of steps that another process wrote again" in caplog.text


def test_missing_steps_are_listed() -> None:
    assert find_missing([0, 1, 4], 5) == [2, 3, 5]
