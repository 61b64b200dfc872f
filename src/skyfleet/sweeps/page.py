"""The page of a sweep: verdicts against the baseline, data scaling, learning curves and runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from skyfleet.analysis.formatting import format_count
from skyfleet.analysis.html.bars import interval_cell
from skyfleet.analysis.html.charts import (
    STEPS,
    Point,
    Series,
    XAxis,
    line_chart,
    round_range,
    slot_class,
)
from skyfleet.analysis.html.curves import value_range
from skyfleet.analysis.html.elements import (
    Child,
    Html,
    columns,
    grid,
    join,
    legend,
    note,
    paragraphs,
    section,
    table,
    tag,
)
from skyfleet.analysis.html.formatting import NOTHING, PERCENT, count, percent, points, seconds
from skyfleet.analysis.html.page import render_page
from skyfleet.analysis.html.page_data import slot_letters
from skyfleet.analysis.html.verdicts import badge
from skyfleet.evaluation.compare_seeds import SeedScore
from skyfleet.storage.local import write_atomically
from skyfleet.sweeps.results import SweepResults, SweepVerdict, VariantResult
from skyfleet.sweeps.tables import METHOD, format_results

PAGE, TABLES = "sweep.html", "results.md"
_SIZES = XAxis(name="tasks", logarithmic=True)


def write_page(results: SweepResults) -> None:
    """Write sweep.html and results.md into the sweep's folder."""
    folder = results.plan.folder
    write_atomically(folder / TABLES, format_results(results))
    write_atomically(folder / PAGE, build_page(results).encode("utf-8", "backslashreplace"))


def build_page(results: SweepResults) -> str:
    has_sizes = len(results.plan.grid.data_sizes) > 1
    sections = {
        "verdicts": "Verdicts",
        **({"scaling": "Data scaling"} if has_sizes else {}),
        "curves": "Curves",
        "scores": "Scores",
        "runs": "Runs",
    }
    name = results.plan.name
    body = join(
        _summary(results),
        _verdict_section(results),
        _scaling_section(results) if has_sizes else None,
        _curve_section(results),
        _score_section(results),
        _run_section(results),
    )
    return render_page(f"{name} · skyfleet sweep", name, sections, body, "skyfleet sweep")


def _summary(results: SweepResults) -> Html:
    plan = results.plan
    n_done = sum(one.state == "finished" for one in results.runs)
    lines = [
        f"{plan.config_name}: {format_count(len(results.variants), 'setting')} x "
        f"{format_count(len(plan.seeds), 'seed')}, "
        f"{count(n_done)} of {count(len(plan.runs))} runs finished, {count(len(results.failed))} failed.",
        *(
            f"{source}: dataset version {version}."
            for source, version in plan.data_versions.items()
        ),
    ]
    keys = legend((slot_class(n), _title(n, one)) for n, one in enumerate(results.variants))
    return join(
        tag("ul", [tag("li", line) for line in lines], class_="summary"),
        keys,
        paragraphs(results.notes),
    )


def _title(slot: int, variant: VariantResult) -> str:
    return f"{slot_letters(slot)} {variant.label}"


def _verdict_section(results: SweepResults) -> Html:
    if not results.verdicts:
        return section("verdicts", "Verdicts", note("There is nothing to compare yet."))
    ends = (abs(end) for one in results.verdicts for end in one.compared.change.interval)
    half_width = max(round_range(ends))
    head = columns(
        *("Set", "Setting", "Baseline", "Tasks", "Seeds", "Baseline pass@1", "pass@1", "Points"),
        *("95 % interval", "", "p", "Detectable", "Verdict"),
        text=("Set", "Setting", "Baseline", "Verdict"),
        draw=("",),
    )
    titles = {one.label: _title(slot, one) for slot, one in enumerate(results.variants)}
    left_out = sum(one.compared.change.n_left_out for one in results.verdicts)
    return section(
        "verdicts",
        "Verdicts",
        table(
            "Every setting against its baseline",
            head,
            [_verdict_row(one, titles, half_width) for one in results.verdicts],
        ),
        note(METHOD.format(n=results.n_comparisons)),
        note(
            "Detectable: the smallest true difference, in points, that is detected with 80 % power."
        ),
        note(f"{count(left_out)} tasks that are not graded in every run of a row are left out.")
        if left_out
        else None,
    )


def _verdict_row(one: SweepVerdict, titles: Mapping[str, str], half_width: float) -> list[Child]:
    change = one.compared.change
    low, high = change.interval
    return [
        one.set_name,
        titles[one.variant.label],
        titles[one.baseline.label],
        count(change.n_tasks),
        count(len(one.compared.seeds)),
        percent(change.before),
        percent(change.after),
        points(change.difference),
        f"{points(low)} to {points(high)}",
        interval_cell(low, change.difference, high, half_width=half_width),
        "< 0.001" if change.corrected_p_value < 0.001 else f"{change.corrected_p_value:.3f}",
        f"{100 * change.detectable:.1f}",
        badge(change.verdict),
    ]


def _scaling_section(results: SweepResults) -> Html:
    """One chart per set, one line per setting, over the number of training tasks."""
    grid_ = results.plan.grid
    lines = list(enumerate(grid_.settings))
    charts = {
        name: [
            Series(
                label=slot_letters(slot) if len(lines) > 1 else "",
                slot=slot,
                points=_scaling_points(results, settings, name),
            )
            for slot, settings in lines
        ]
        for name in results.set_names
    }
    names = (
        ", ".join(f"{grid_.shorten_key(key)}={value}" for key, value in settings)
        for _, settings in lines
    )
    keys = legend(
        (slot_class(slot), f"{slot_letters(slot)} {name}") for slot, name in enumerate(names)
    )
    return section(
        "scaling",
        "Performance against the number of training tasks",
        keys if len(lines) > 1 else None,
        _draw(charts, _SIZES),
        note(
            "pass@1 at the last step, mean over tasks and seeds with its 95 % interval. The subsets of "
            "one seed are nested, every environment has its share of each, and the evaluation sets are "
            "the same for all. The axis is logarithmic."
        ),
    )


def _scaling_points(
    results: SweepResults, settings: tuple[tuple[str, str], ...], set_name: str
) -> tuple[Point, ...]:
    found = [
        (one.variant.data_size, score)
        for one in results.variants
        if one.variant.settings == settings and (score := one.score(set_name)) is not None
    ]
    return tuple(_point(size, score) for size, score in found if size is not None)


def _point(step: int, score: SeedScore) -> Point:
    seeds = format_count(len(score.rate_by_seed), "seed")
    return Point(
        step=step,
        value=score.rate,
        interval=score.interval,
        note=f", {count(score.n_tasks)} tasks x {seeds}",
    )


def _curve_section(results: SweepResults) -> Html:
    charts = {
        name: [
            Series(
                label=slot_letters(slot),
                slot=slot,
                points=tuple(_point(*at) for at in variant.curve(name)),
            )
            for slot, variant in enumerate(results.variants)
        ]
        for name in results.set_names
    }
    return section(
        "curves",
        "Learning curves",
        note("pass@1, mean over tasks and seeds; bands are 95 % intervals."),
        _draw(charts, STEPS),
    )


def _draw(charts: Mapping[str, Sequence[Series]], x_axis: XAxis) -> Html:
    """Charts of one range; a set without a finished run has none."""
    drawn = {name: series for name, series in charts.items() if any(one.points for one in series)}
    if not drawn:
        return note("No run has finished yet.")
    y_range = value_range(one for series in drawn.values() for one in series)
    return grid(
        (
            line_chart(name, series, y_range=y_range, unit=PERCENT, x_axis=x_axis)
            for name, series in drawn.items()
        ),
        span=4,
    )


def _score_section(results: SweepResults) -> Html:
    rows = [
        [name, _title(slot, variant), *_score_cells(variant, name)]
        for name in results.set_names
        for slot, variant in enumerate(results.variants)
    ]
    head = columns(
        *("Set", "Setting", "Training tasks", "Steps", "Seeds", "Before RL", "pass@1"),
        *("95 % interval", "By seed"),
        text=("Set", "Setting", "By seed"),
    )
    return section("scores", "Scores", table("The last evaluation of every setting", head, rows))


def _score_cells(variant: VariantResult, set_name: str) -> Iterable[str]:
    score = variant.score(set_name)
    before = dict(variant.curve(set_name)).get(0)
    yield NOTHING if variant.n_tasks is None else count(variant.n_tasks)
    yield ", ".join(map(count, variant.steps)) or NOTHING
    if score is None:
        yield from ("0", *[NOTHING] * 4)
        return
    yield count(len(score.rate_by_seed))
    yield NOTHING if before is None else percent(before.rate)
    yield percent(score.rate)
    yield f"{percent(score.interval[0])} to {percent(score.interval[1])}"
    yield ", ".join(f"{seed}: {percent(rate)}" for seed, rate in score.rate_by_seed.items())


def _run_section(results: SweepResults) -> Html:
    rows = [
        [
            tag("a", one.run.name, href=f"{one.run.name}/report.html")
            if one.state == "finished"
            else one.run.name,
            results.plan.grid.describe(one.run.variant),
            str(one.run.seed),
            one.state,
            seconds(one.record.seconds) if one.record.seconds else NOTHING,
            one.record.error or "",
        ]
        for one in results.runs
    ]
    head = columns(
        *("Run", "Setting", "Seed", "State", "Time", "Error"),
        text=("Run", "Setting", "State"),
        prose=("Error",),
    )
    return section("runs", "Runs", table("The runs of the sweep", head, rows))
