"""Formatting for a terminal."""

from __future__ import annotations

from skyfleet.analysis.formatting import (
    NOTHING,
    format_count,
    format_share,
    format_steps,
    table,
)
from skyfleet.terminal import sanitize


def test_a_table_right_aligns_numbers_and_escapes_bars() -> None:
    assert table(("a", "name"), [("1", "x|y"), ("20", "z")]).splitlines() == [
        "|  a | name |",
        "| -: | ---- |",
        r"|  1 | x\|y |",
        "| 20 | z    |",
    ]


def test_a_table_without_rows_is_a_header() -> None:
    assert table(("a", "b"), []) == "| a  | b  |\n| -- | -- |"


def test_control_characters_and_surrogates_are_escaped() -> None:
    assert sanitize("\x1b[2J\n\ud800\u202eé") == r"\x1b[2J\n\ud800\u202eé"
    assert r"| \x1b[2J |" in table(("a",), [("\x1b[2J",)])


def test_counts_shares_and_steps_are_formatted() -> None:
    assert (format_share(1, 8), format_share(0, 0)) == ("12.5 %", NOTHING)
    assert (format_count(1, "win"), format_count(1200, "win")) == ("1 win", "1,200 wins")
    assert format_steps([80, 0]) == "steps 0, 80"
    assert format_steps([1, 2, 3, 5]) == "steps 1 to 3, 5"
    assert format_steps([]) == "no steps"
