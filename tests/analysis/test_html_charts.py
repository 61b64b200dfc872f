"""Charts have round ticks and correct bands, and all text is escaped."""

from __future__ import annotations

import re

import pytest

from skyfleet.analysis.html.bars import Sample, histogram
from skyfleet.analysis.html.charts import (
    Point,
    Scale,
    Series,
    XAxis,
    line_chart,
    round_range,
    ticks,
)
from skyfleet.analysis.html.curves import mean_rewards, mixed_shares
from skyfleet.analysis.html.elements import join, tag
from skyfleet.analysis.html.formatting import PERCENT, count, format_value, percent, points, seconds


def test_plain_strings_are_escaped() -> None:
    inner = tag("b", "<i>", title='"><script>')
    assert inner == '<b title="&quot;&gt;&lt;script&gt;">&lt;i&gt;</b>'
    assert join("<", [inner, "&"], None) == f"&lt;{inner}&amp;"
    assert tag("meta", http_equiv="x", hidden=True, id=None) == '<meta http-equiv="x" hidden>'


def test_ticks_are_round_numbers() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(0, 3, whole=True) == [0.0, 1.0, 2.0, 3.0]
    assert ticks(5, 5) == [5]
    assert round_range([0.31, 0.57]) == pytest.approx((0.0, 0.6))
    assert round_range([-3.0, float("nan"), 5.0]) == (-4.0, 6.0)
    assert round_range([]) == (0.0, 1.0)
    assert Scale(low=0, high=10, start=100, end=0)(2.5) == 75.0
    assert Scale(low=10, high=1000, start=0, end=100, logarithmic=True)(100) == 50.0


def test_numbers_are_formatted() -> None:
    assert percent(0.4876) == "48.8\N{NO-BREAK SPACE}%"
    assert [points(0.0891), points(-0.02), points(-1e-9)] == ["+8.9", "\N{MINUS SIGN}2.0", "+0.0"]
    assert count(20480) == "20\N{NARROW NO-BREAK SPACE}480"
    assert [seconds(s).replace("\N{NO-BREAK SPACE}", " ") for s in (2.134, 75.2, 3720)] == [
        "2.13 s",
        "1 min 15 s",
        "1 h 02 min",
    ]
    assert format_value(["a", "b"]) == "a\nb"
    assert format_value({"x": [1]}) == "x: [1]"


def test_a_window_averages_its_prompts_with_students_interval() -> None:
    (one,) = mean_rewards({3: [[0.0], [1.0], [0.0], [1.0]]})
    # t of 0.975 with 3 degrees is 3.182, the deviation 0.577, so 0.5 ± 0.919, clipped to the values.
    assert (one.step, one.value, one.interval) == (3, 0.5, (0.0, 1.0))
    # Sixteen steps have a window of one step on each side.
    points_of = mean_rewards({step: [[float(step)], [0.0]] for step in range(16)})
    assert [points_of[at].value for at in (0, 5, 15)] == [0.25, 2.5, 7.25]
    assert mean_rewards({}) == ()


def test_equal_prompts_have_no_interval() -> None:
    for alike in ([[0.25]], [[0.0, 1.0]] * 9):
        (point,) = mean_rewards({1: alike})
        assert point.interval is None
    # Wilson's for none of 16 is 0 to 3.84 / (16 + 3.84).
    (none,) = mixed_shares({1: [[0.0, 0.0]] * 16})
    assert none.interval == pytest.approx((0.0, 0.1936), abs=1e-4)


def test_a_long_run_has_few_points_including_the_last_step() -> None:
    steps = [point.step for point in mean_rewards({step: [[1.0]] for step in range(1, 1002)})]
    assert len(steps) == 60
    assert steps[-1] == 1001


def test_a_line_chart_has_a_title_per_point_and_labels_at_the_ends() -> None:
    points_of = (
        Point(step=0, value=0.25, interval=(0.2, 0.3)),
        Point(step=10, value=0.5, interval=(0.4, 0.6), note=", 9 tasks"),
        Point(step=20, value=float("nan")),
    )
    both = [Series(label=label, slot=at, points=points_of) for at, label in enumerate("AB")]
    chart = line_chart("mail", both, y_range=(0.0, 1.0), unit=PERCENT).replace("\xa0", " ")
    assert "<title>A, step 0: 25.0 % (20.0 % to 30.0 %)</title>" in chart
    assert "<title>B, step 10: 50.0 % (40.0 % to 60.0 %), 9 tasks</title>" in chart
    assert chart.count("<circle") == 4
    assert "nan" not in chart
    ends = [float(y) for y in re.findall(r'y="([\d.]+)" class="label', chart)]
    assert abs(ends[0] - ends[1]) >= 13
    assert "No values." in line_chart("none", [], y_range=(0.0, 1.0), unit=PERCENT)


def test_a_logarithmic_axis_has_its_ticks_at_the_points() -> None:
    sizes = (Point(step=20, value=0.1), Point(step=60, value=0.2), Point(step=180, value=0.3))
    series = [Series(label="", slot=0, points=sizes)]
    axis = XAxis(name="tasks", logarithmic=True)
    chart = line_chart("val", series, y_range=(0.0, 1.0), unit=PERCENT, x_axis=axis)
    labels = re.findall(r'<text x="([\d.]+)" y="\d+" class="tick middle">(\d+)</text>', chart)
    assert [label for _, label in labels] == ["20", "60", "180"]
    low, middle, high = (float(x) for x, _ in labels)
    assert middle == pytest.approx((low + high) / 2, abs=0.1)
    assert "tasks 60: 20.0" in chart


def test_a_histogram_has_a_bar_per_value_or_per_range() -> None:
    few = histogram("reward", [Sample(label="late", style="s0", values=(0.0, 1.0, 1.0, 1.0))])
    assert re.findall(r"<title>(.*?)</title>", few.replace("\xa0", " ")) == [
        "late, 0: 25.0 %",
        "late, 1: 75.0 %",
    ]
    # 0 to 99 and one outlier: ranges of ten, the outlier in the last.
    many = histogram(
        "tokens", [Sample(label="late", style="s0", values=(*map(float, range(99)), 5000.0))]
    )
    titles = re.findall(r"<title>(.*?)</title>", many.replace("\xa0", " "))
    assert titles[:2] == ["late, 0 to 10: 10.0 %", "late, 10 to 20: 10.0 %"]
    assert titles[-1] == "late, 90 or more: 10.0 %"
