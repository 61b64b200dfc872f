"""Tables that read as well in a terminal as in markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of which every cell is a number are set to the right."""
    columns = list(zip(*rows, strict=True))
    right = [all(cell.isdecimal() for cell in column) for column in columns]
    cells = [[cell.replace("|", r"\|") for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = [
        "-" * (width - 1) + ":" if to_right else "-" * width
        for width, to_right in zip(widths, right, strict=True)
    ]
    lines = [
        "| "
        + " | ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        + " |"
        for row in (cells[0], rule, *cells[1:])
    ]
    return "\n".join(lines)
