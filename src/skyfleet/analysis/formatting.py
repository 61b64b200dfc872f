"""Formatting of numbers and tables for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skyfleet.terminal import sanitize

NOTHING = "\N{EN DASH}"
"""Shown in place of a missing number."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns that only contain numbers are right-aligned."""
    cells = [[sanitize(cell).replace("|", r"\|") for cell in row] for row in (header, *rows)]
    columns = list(zip(*cells, strict=True))
    # At least two: Markdown ignores a rule of one character.
    widths = [max(2, *map(len, column)) for column in columns]
    right = [bool(rows) and all(map(str.isdecimal, column[1:])) for column in columns]
    rule = [
        "-" * (width - 1) + ":" if to_right else "-" * width
        for width, to_right in zip(widths, right, strict=True)
    ]
    lines = (
        " | ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        for row in (cells[0], rule, *cells[1:])
    )
    return "\n".join(f"| {line} |" for line in lines)


def percent(share: float, *, digits: int = 0) -> str:
    """`percent(0.488)` is 49 %."""
    return f"{100 * share:.{digits}f} %"


def format_share(count: int, total: int) -> str:
    """`format_share(1, 8)` is 12.5 %; a dash if the total is 0."""
    return percent(count / total, digits=1) if total else NOTHING


def format_count(n: int, noun: str) -> str:
    """`format_count(1, "finding")` is 1 finding."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def format_steps(steps: Iterable[int]) -> str:
    """`format_steps([0, 1, 2, 3, 80])` is `steps 0 to 3, 80`."""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    parts = (str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"steps {', '.join(parts)}" if runs else "no steps"
