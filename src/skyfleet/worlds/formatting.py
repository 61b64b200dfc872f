"""Observation: what a tool found, in as few tokens as a reader needs."""

from __future__ import annotations

MAX_ROWS = 5
"""Listings stop here and say how many more there are."""


def show(result: object) -> str:
    """Rows as a header and lines of commas, one row as `key: value` lines, the rest as it is.

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
