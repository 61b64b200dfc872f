"""Line charts over steps with interval bands, as inline SVG.

A chart can be focused, and the arrow keys move through its points; each point has its values in a
`<title>`. Colours and fonts come from the style sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, isfinite, log10

from skyfleet.analysis.html.elements import Html, join, tag
from skyfleet.analysis.html.formatting import Unit

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_WIDTH, _HEIGHT = 280.0, 166.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 58.0, 12.0, 24.0
_LABEL_HEIGHT = 13.0
_FEW = 12
"""Up to this many points, each is drawn with its own interval."""
_SLOTS = 6
Range = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A map from [low, high] to [start, end]: linear, or logarithmic from a positive low."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = log10(value), log10(low), log10(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def round_step(span: float, n_ticks: int) -> float:
    """The round number that divides the span into about `n_ticks`. `(1.0, 4)` gives 0.25."""
    wanted = span / n_ticks
    power = 10.0 ** floor(log10(wanted))
    return next(step * power for step in _STEPS if step * power >= wanted * (1 - 1e-9))


def round_range(values: Iterable[float], *, n_ticks: int = 4) -> tuple[float, float]:
    """A range that contains zero and all values, with round ends; 0 to 1 without values."""
    known = [value for value in values if isfinite(value)]
    low, high = min([0.0, *known]), max([0.0, *known])
    if low == high:
        return 0.0, 1.0
    step = round_step(high - low, n_ticks)
    return floor(low / step + 1e-9) * step, ceil(high / step - 1e-9) * step


def ticks(low: float, high: float, *, n_ticks: int = 4, whole: bool = False) -> list[float]:
    """Round numbers from low to high; integers if `whole`."""
    if high <= low:
        return [low]
    step = round_step(high - low, n_ticks)
    step = max(1.0, ceil(step)) if whole else step
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    step: int
    value: float
    interval: Range | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    label: str
    """Empty if the chart has one series."""
    slot: int
    """Selects the colour and dash."""
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class XAxis:
    name: str
    logarithmic: bool = False
    """A logarithmic axis has its ticks at the points."""


STEPS = XAxis(name="step")


def slot_class(slot: int) -> str:
    return f"s{slot % _SLOTS}"


def line_chart(
    title: str, series: Sequence[Series], *, y_range: Range, unit: Unit, x_axis: XAxis = STEPS
) -> Html:
    """A figure; omits series without a finite point."""
    drawn = [known for one in series if (known := _finite(one)).points]
    if not drawn:
        return figure(title, tag("p", "No values.", class_="none"))
    steps = [point.step for one in drawn for point in one.points]
    x = Scale(
        low=min(steps),
        high=max(steps),
        start=_LEFT,
        end=_WIDTH - _RIGHT,
        logarithmic=x_axis.logarithmic,
    )
    y = Scale(low=y_range[0], high=y_range[1], start=_HEIGHT - _BOTTOM, end=_TOP)
    last = ", ".join(f"{one.label} {unit.value(one.points[-1].value)}".strip() for one in drawn)
    body = join(
        _axes(x, y, unit, x_axis, steps),
        [_line(one, x, y, unit, x_axis) for one in drawn],
        _end_labels(drawn, x, y, unit),
    )
    return figure(title, svg(f"{title}: last {last}", body, navigable=True))


def figure(title: str, body: Html) -> Html:
    return tag("figure", tag("figcaption", title), body, class_="chart")


def svg(
    label: str,
    body: Html,
    *,
    width: float = _WIDTH,
    height: float = _HEIGHT,
    navigable: bool = False,
) -> Html:
    """`navigable`: it can be focused, and the arrow keys move through its points."""
    return tag(
        "svg",
        body,
        viewBox=f"0 0 {width:g} {height:g}",
        role="group" if navigable else "img",
        aria_label=label,
        tabindex="0" if navigable else None,
        class_="navigable" if navigable else None,
    )


def _finite(series: Series) -> Series:
    points = tuple(point for point in series.points if isfinite(point.value))
    return Series(label=series.label, slot=series.slot, points=points)


def _axes(x: Scale, y: Scale, unit: Unit, x_axis: XAxis, steps: Sequence[int]) -> Html:
    parts = []
    for value in ticks(y.low, y.high):
        at = y(value)
        parts.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=at, y2=at, class_="mesh"))
        parts.append(tag("text", unit.tick(value), x=_LEFT - 6, y=at + 4, class_="tick end"))
    below = _HEIGHT - _BOTTOM + 16
    marks: Sequence[float] = ticks(x.low, x.high, whole=True)
    if x_axis.logarithmic:
        marks = sorted(set(steps))
    labels = (
        tag("text", f"{value:g}", x=x(value), y=below, class_="tick middle") for value in marks
    )
    return join(parts, tag("text", x_axis.name, x=_LEFT - 10, y=below, class_="tick end"), labels)


def _line(series: Series, x: Scale, y: Scale, unit: Unit, x_axis: XAxis) -> Html:
    few = len(series.points) <= _FEW
    path = " L".join(f"{x(p.step):g} {y(p.value):g}" for p in series.points)
    dots = (
        _dot(point, series.label, x, y, unit, name=x_axis.name, few=few) for point in series.points
    )
    return tag(
        "g",
        _band(series.points, x, y),
        [_whisker(p, x, y) for p in series.points if few and p.interval],
        tag("path", d=f"M{path}", class_="line"),
        dots,
        class_=slot_class(series.slot),
    )


def _band(points: Sequence[Point], x: Scale, y: Scale) -> Html:
    """Connects neighbours that both have an interval."""
    parts = []
    for one, other in pairwise(points):
        if one.interval and other.interval:
            (low, high), (next_low, next_high) = one.interval, other.interval
            at, then = f"{x(one.step):g}", f"{x(other.step):g}"
            parts.append(f"M{at} {y(low):g}V{y(high):g}L{then} {y(next_high):g}V{y(next_low):g}Z")
    return tag("path", d="".join(parts), class_="band") if parts else Html()


def _whisker(point: Point, x: Scale, y: Scale) -> Html:
    low, high = point.interval or (point.value, point.value)
    at = x(point.step)
    return tag("line", x1=at, x2=at, y1=y(low), y2=y(high), class_="whisker")


def _dot(point: Point, label: str, x: Scale, y: Scale, unit: Unit, *, name: str, few: bool) -> Html:
    text = f"{label + ', ' if label else ''}{name} {point.step}: {unit.value(point.value)}"
    if point.interval:
        text += f" ({unit.value(point.interval[0])} to {unit.value(point.interval[1])})"
    return tag(
        "circle",
        tag("title", text + point.note),
        cx=x(point.step),
        cy=y(point.value),
        r=3.0,
        class_="dot" if few else "dot quiet",
        tabindex="-1",
        role="img",
    )


def _end_labels(series: Sequence[Series], x: Scale, y: Scale, unit: Unit) -> Html:
    """The last values at the ends of the lines, moved apart if they would overlap."""
    labels = []
    below = float("inf")
    for one in sorted(series, key=lambda one: y(one.points[-1].value), reverse=True):
        last = one.points[-1]
        at = min(y(last.value) + 4, below - _LABEL_HEIGHT)
        below = at
        text = f"{one.label} {unit.value(last.value)}".strip()
        labels.append(
            tag("text", text, x=x(x.high) + 7, y=at, class_=f"label {slot_class(one.slot)}")
        )
    return join(labels)
