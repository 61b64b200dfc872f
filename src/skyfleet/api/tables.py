"""Tables and charts that print, render in a notebook, and convert to pyarrow and pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from html import escape
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN_ROWS, _SHOWN_COLUMNS = 10, 8
_WIDTH, _HEIGHT, _MARGIN = 480.0, 200.0, 40.0


class Table:
    """Rows and columns, such as the metrics of a run: one row per step, one column per metric.

    >>> import skyfleet as sf
    >>> table = sf.Table.from_rows([{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.0}])
    >>> table["loss"]
    [2.0, 1.0]
    >>> table.to_arrow().num_rows
    2
    """

    def __init__(self, arrow: pa.Table) -> None:
        self._arrow = arrow

    @classmethod
    def from_rows(
        cls, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None
    ) -> Table:
        """A column is every key of any row; a row without it has None there."""
        import pyarrow as pa

        names = columns or list(dict.fromkeys(name for row in rows for name in row))
        return cls(pa.table({name: [row.get(name) for row in rows] for name in names}))

    @property
    def columns(self) -> list[str]:
        return list(self._arrow.column_names)

    def to_arrow(self) -> pa.Table:
        return self._arrow

    def to_pandas(self) -> Any:
        try:
            import pandas  # noqa: F401
        except ImportError:
            raise ConfigError(
                "to_pandas() needs pandas: pip install pandas, or use to_arrow()"
            ) from None
        return self._arrow.to_pandas()

    def plot(self, *keys: str, x: str = "step") -> Chart:
        """A line chart of one or several columns; it renders in a notebook, `save` writes it."""
        series = {}
        for key in keys:
            pairs = zip(self[x], self[key], strict=True)
            series[key] = [
                (float(a), float(b)) for a, b in pairs if a is not None and b is not None
            ]
        return Chart(series, x=x)

    def __getitem__(self, key: str) -> list[Any]:
        """A column. A table has no rows to index or to iterate over."""
        if not isinstance(key, str):
            names = ", ".join(map(repr, self.columns[:3]))
            raise ConfigError(
                f"table[{key!r:.60}]: name a column, such as {names}; to_arrow().to_pylist() is the rows"
            )
        if key not in self._arrow.column_names:
            near = get_close_matches(key, self.columns, n=3, cutoff=0.4) or self.columns[:5]
            raise ConfigError(f"there is no column {key!r}; some that exist: {', '.join(near)}")
        values: list[Any] = self._arrow.column(key).to_pylist()
        return values

    def __len__(self) -> int:
        return int(self._arrow.num_rows)

    def __repr__(self) -> str:
        return f"Table({len(self)} rows x {len(self.columns)} columns: {', '.join(self.columns[:5])}, ...)"

    def _repr_html_(self) -> str:
        names = self.columns[:_SHOWN_COLUMNS]
        rows = self._arrow.slice(max(0, len(self) - _SHOWN_ROWS)).select(names).to_pylist()
        return html_table(names, [[_format(row[name]) for name in names] for row in rows]) + (
            f"<p>{len(self)} rows x {len(self.columns)} columns</p>"
        )


class Chart:
    """Lines over steps as SVG: renders in a notebook, and `save` writes a file."""

    def __init__(self, series: Mapping[str, Sequence[tuple[float, float]]], *, x: str) -> None:
        self.series, self.x = {name: list(points) for name, points in series.items()}, x

    def save(self, path: str | Path) -> Path:
        """Write the chart as an SVG file."""
        Path(path).write_text(self.to_svg(), encoding="utf-8")
        return Path(path)

    def to_svg(self) -> str:
        from skyfleet.analysis.html.charts import Scale, round_range, ticks

        points = [p for line in self.series.values() for p in line if all(map(isfinite, p))]
        if not points:
            return f"<svg xmlns='http://www.w3.org/2000/svg'><text y='20'>{escape(repr(self))}</text></svg>"
        low, high = round_range([y for _, y in points])
        xs = [x for x, _ in points]
        across = Scale(low=min(xs), high=max(xs), start=_MARGIN, end=_WIDTH - 10)
        up = Scale(low=low, high=high, start=_HEIGHT - 30, end=24)
        parts = [
            f"<line x1='{_MARGIN}' x2='{_WIDTH - 10}' y1='{up(y)}' y2='{up(y)}' stroke='#ddd'/>"
            f"<text x='{_MARGIN - 4}' y='{up(y) + 4}' text-anchor='end'>{y:g}</text>"
            for y in ticks(low, high)
        ]
        parts += [
            f"<text x='{across(x)}' y='{_HEIGHT - 12}' text-anchor='middle'>{x:g}</text>"
            for x in ticks(min(xs), max(xs), whole=True)
        ]
        colours = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2")
        for number, (name, line) in enumerate(self.series.items()):
            colour = colours[number % len(colours)]
            path = " ".join(f"{across(x)},{up(y)}" for x, y in line if isfinite(y))
            parts.append(
                f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>"
            )
            parts.append(
                f"<text x='{_MARGIN + 150 * number}' y='14' fill='{colour}'>{escape(name)}</text>"
            )
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH:g} {_HEIGHT:g}' "
            f"width='{_WIDTH:g}' font-family='sans-serif' font-size='11'>{''.join(parts)}</svg>"
        )

    def __repr__(self) -> str:
        ends = (f"{name} {line[-1][1]:.4g}" for name, line in self.series.items() if line)
        return f"Chart(last: {', '.join(ends) or 'no values'})"

    def _repr_html_(self) -> str:
        return self.to_svg()


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def markdown_to_html(text: str) -> str:
    """Our own Markdown tables as HTML; other lines become paragraphs."""
    parts: list[str] = []
    table: list[list[str]] = []
    for line in (*text.splitlines(), ""):
        if line.startswith("|"):
            cells = [cell.strip().replace("\x00", "|") for cell in line.strip("|").split(" | ")]
            table.append(cells)
            continue
        if table:
            parts.append(html_table(table[0], table[2:]))
            table = []
        if line:
            parts.append(f"<p>{escape(line)}</p>")
    return "".join(parts)


def _format(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
