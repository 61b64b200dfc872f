"""Formatting of tool results as short text."""

from __future__ import annotations

MAX_ROWS = 5
"""A longer listing is cut here and ends with the number of omitted rows."""


def show(result: object) -> str:
    """Format rows as CSV with a header, one row as `key: value` lines, anything else as `str`.

    `show([{"id": 3, "name": "amy"}])` is "id,name" and "3,amy" on two lines.
    """
    if result is None:
        return "ok"
    if result == "":
        return '""'
    if isinstance(result, dict):
        return "\n".join(f"{key}: {_cell(value)}" for key, value in result.items())
    if isinstance(result, list) and result:
        lines = [",".join(result[0])]
        lines += [",".join(map(_cell, row.values())) for row in result[:MAX_ROWS]]
        if len(result) > MAX_ROWS:
            lines.append(f"{len(result) - MAX_ROWS} more")
        return "\n".join(lines)
    return str(result)


def _cell(value: object) -> str:
    return "none" if value is None else " ".join(str(value).split())
