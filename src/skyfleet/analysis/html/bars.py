"""Histograms, and small bars inside table cells."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor

from skyfleet.analysis.html.charts import Scale, figure, round_range, round_step, svg, ticks
from skyfleet.analysis.html.elements import Html, join, tag
from skyfleet.analysis.html.formatting import PERCENT, number, percent, points

_WIDTH, _HEIGHT = 380.0, 166.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 8.0, 10.0, 24.0
_CELL_WIDTH, _CELL_HEIGHT = 120.0, 16.0
_MAX_BARS = 12
_MAX_BAR_WIDTH = 44.0
"""Limits the width of a bar if there are few values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One series of a histogram."""

    label: str
    style: str
    """A CSS class: `slot_class(...)` or `before`."""
    values: tuple[float, ...]


def histogram(title: str, samples: Sequence[Sample]) -> Html:
    """The share of each sample's values per value, or per range of equal width."""
    known = [sample for sample in samples if sample.values]
    if not known:
        return figure(title, tag("p", "No values.", class_="none"))
    everything = [value for sample in known for value in sample.values]
    edges = _edges(everything)
    fractions = [_bin_fractions(sample.values, edges) for sample in known]
    _, top = round_range(
        fraction for sample_fractions in fractions for fraction in sample_fractions
    )
    y = Scale(low=0.0, high=top, start=_HEIGHT - _BOTTOM, end=_TOP)
    slot_width = (_WIDTH - _LEFT - _RIGHT) / len(edges)
    width = min(_MAX_BAR_WIDTH, slot_width * 0.8 / len(known))
    parts = [_y_axis(y)]
    for index, name in enumerate(_names(everything, edges)):
        middle = _LEFT + (index + 0.5) * slot_width
        # Every second label if all would not fit.
        if len(edges) <= 8 or index % 2 == 0:
            edge = number(edges[index])
            parts.append(tag("text", edge, x=round(middle, 1), y=_HEIGHT - 8, class_="tick middle"))
        for position, (sample, sample_fractions) in enumerate(zip(known, fractions, strict=True)):
            left = middle + (position - len(known) / 2) * width
            text = f"{sample.label}, {name}: {percent(sample_fractions[index])}"
            parts.append(_bar(text, left, width, y(sample_fractions[index]), sample.style))
    label = f"{title}: {', '.join(sample.label for sample in known)}"
    return figure(title, svg(label, join(parts), width=_WIDTH, height=_HEIGHT, navigable=True))


def interval_cell(
    low: float, middle: float, high: float, *, half_width: float, more_is_better: bool = True
) -> Html:
    """An interval with its middle; zero is in the centre, `half_width` at both ends."""
    x = Scale(low=-half_width, high=half_width, start=4.0, end=_CELL_WIDTH - 4.0)
    centre, half = x(0.0), _CELL_HEIGHT / 2
    more, less = ("up", "down") if more_is_better else ("down", "up")
    side = more if low > 0 else less if high < 0 else "flat"
    body = join(
        tag("line", x1=centre, x2=centre, y1=0.0, y2=_CELL_HEIGHT, class_="zero"),
        tag("line", x1=x(low), x2=x(high), y1=half, y2=half, class_="whisker"),
        tag("circle", cx=x(middle), cy=half, r=3.5, class_="dot"),
    )
    text = f"{points(middle)}, from {points(low)} to {points(high)}"
    return tag("span", _cell(text, body), class_=f"cell {side}")


def share_cell(share: float) -> Html:
    """A bar whose length is the share."""
    width = max(0.0, min(1.0, share)) * _CELL_WIDTH
    body = join(
        tag("rect", x=0.0, y=4.0, width=_CELL_WIDTH, height=8.0, class_="track"),
        tag("rect", x=0.0, y=4.0, width=round(width, 1), height=8.0, class_="fill"),
    )
    return tag("span", _cell(percent(share), body), class_="cell")


def _cell(text: str, body: Html) -> Html:
    return svg(text, join(tag("title", text), body), width=_CELL_WIDTH, height=_CELL_HEIGHT)


def _edges(values: Sequence[float]) -> list[float]:
    """The distinct values if they are few, otherwise the starts of equal ranges."""
    distinct = sorted(set(values))
    if len(distinct) <= _MAX_BARS:
        return distinct
    # The highest 1 % share the last range, so that one outlier does not flatten the rest.
    low, high = distinct[0], sorted(values)[ceil(0.99 * len(values)) - 1]
    if high <= low:
        return [low, distinct[1]]
    step = round_step(high - low, _MAX_BARS - 2)
    return [n * step for n in range(floor(low / step), floor(high / step) + 1)]


def _names(values: Sequence[float], edges: Sequence[float]) -> list[str]:
    """`3` for a value; `20 to 40` and finally `40 or more` for ranges."""
    starts = [number(edge) for edge in edges]
    if set(values) == set(edges):
        return starts
    ranges = [f"{start} to {end}" for start, end in pairwise(starts)]
    return [*ranges, f"{starts[-1]} or more"]


def _bin_fractions(values: Sequence[float], edges: Sequence[float]) -> list[float]:
    counts = [0] * len(edges)
    for value in values:
        # A small tolerance, so that 0.3 lies in the range that starts at 3 x 0.1.
        counts[max(0, bisect_right(edges, value + 1e-9) - 1)] += 1
    return [n / len(values) for n in counts]


def _y_axis(y: Scale) -> Html:
    parts = []
    for value in ticks(y.low, y.high):
        at = y(value)
        parts.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=at, y2=at, class_="mesh"))
        parts.append(tag("text", PERCENT.tick(value), x=_LEFT - 6, y=at + 4, class_="tick end"))
    return join(parts)


def _bar(text: str, left: float, width: float, top: float, style: str) -> Html:
    return tag(
        "rect",
        tag("title", text),
        x=round(left, 1),
        y=top,
        width=round(width, 1),
        height=round(_HEIGHT - _BOTTOM - top, 1),
        class_=f"bar {style}",
        tabindex="-1",
        role="img",
    )
