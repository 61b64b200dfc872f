"""The comparison table: markdown that reads as well in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyfleet.evaluation.compare import Change, Comparison

_TEXT = ("set", "environment", "verdict")
_HEADER = (
    "set",
    "environment",
    "tasks",
    "pass@1 before",
    "after",
    "difference",
    "95 % interval",
    "verdict",
)


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """One row per set and environment, and an `all` row for a set with several.

    Differences and their intervals are in percentage points.
    """
    rows = [row for comparison in comparisons for row in _rows(comparison)]
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    rule = [
        "-" * width if name in _TEXT else "-" * (width - 1) + ":"
        for name, width in zip(_HEADER, widths, strict=True)
    ]
    lines = [_line(cells, widths) for cells in (_HEADER, rule, *rows)]
    if left_out := sum(comparison.overall.n_left_out for comparison in comparisons):
        lines += ["", f"Tasks left out, for want of a known grade before and after: {left_out}."]
    return "\n".join(lines) + "\n"


def _rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for env_key, change in comparison.by_env.items():
        yield _row(comparison.name, env_key, change)
    if len(comparison.by_env) > 1:
        yield _row(comparison.name, "all", comparison.overall)


def _row(name: str, env_key: str, change: Change) -> tuple[str, ...]:
    low, high = change.interval
    return (
        name.replace("|", r"\|"),
        env_key.replace("|", r"\|"),
        str(change.n_tasks),
        f"{100 * change.before:.1f} %",
        f"{100 * change.after:.1f} %",
        _points(change.difference),
        f"{_points(low)} to {_points(high)}",
        change.verdict.value,
    )


def _points(difference: float) -> str:
    # Adding zero makes -0.0 a plain zero.
    return f"{round(100 * difference, 1) + 0.0:+.1f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.ljust(width) if name in _TEXT else cell.rjust(width)
        for name, cell, width in zip(_HEADER, cells, widths, strict=True)
    )
    return f"| {' | '.join(padded)} |"
