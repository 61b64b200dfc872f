"""Verdicts: what changed in each set, with intervals, and whether chance could have done it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyfleet.analysis.html.bars import interval_cell
from skyfleet.analysis.html.behaviours import behaviour_table
from skyfleet.analysis.html.blocks import Column, columns, fold, note, paragraphs, section, table
from skyfleet.analysis.html.comparisons import Compared
from skyfleet.analysis.html.findings import Findings
from skyfleet.analysis.html.markup import Child, Html, join, tag
from skyfleet.analysis.html.scale import round_range
from skyfleet.analysis.html.scores import score_faults, score_tables
from skyfleet.analysis.html.wording import count, percent, points
from skyfleet.evaluation.compare import Change, Verdict
from skyfleet.evaluation.table import interval_note, table_changes

_SIGNS = {
    Verdict.IMPROVED: ("▲", "up", "significant, and upwards"),
    Verdict.REGRESSED: ("▼", "down", "significant, and downwards"),
    Verdict.SATURATED: ("●", "flat", "both rates are 95 % or more"),
    Verdict.FAILING: ("○", "flat", "both rates are 5 % or less"),
    Verdict.UNDERPOWERED: (
        "?",
        "flat",
        "too few tasks: a change of 10 points would often be missed",
    ),
    Verdict.NO_EVIDENCE: ("=", "flat", "a change of 10 points would have shown, and did not"),
}


def headline(tables: Sequence[Compared]) -> Html:
    """A sentence for each set, the first thing to read."""
    return join(
        tag("ul", _sentences(one), class_="headline", aria_label=one.caption) for one in tables
    )


def verdict_section(findings: Sequence[Findings], tables: Sequence[Compared]) -> Html:
    """What changed in the score, and beside it what changed in the behaviour."""
    evaluated = [one.run for one in findings if one.run.reports]
    scores = [score_tables(run) for run in evaluated]
    if not scores:
        return section("verdicts", "Verdicts", note("No evaluation was recorded."))
    body: list[Child] = [join(_table(one), paragraphs(one.excuses)) for one in tables]
    if not tables:
        body.append(note("Each set was evaluated once, so there is nothing to compare it with."))
    meanings = [
        tag("div", tag("dt", badge(verdict)), tag("dd", meaning))
        for verdict, (_, _, meaning) in _SIGNS.items()
    ]
    return section(
        "verdicts",
        "Verdicts",
        *body,
        [score_faults(run) for run in evaluated],
        [shown for one in findings if (shown := behaviour_table(one))],
        fold("What the columns and verdicts mean", _explanation(), tag("dl", meanings)),
        fold("Scores of the last evaluation", scores, opened=not tables),
    )


def badge(verdict: Verdict) -> Html:
    sign, style, _ = _SIGNS[verdict]
    return tag(
        "span", tag("span", sign, aria_hidden="true"), f" {verdict}", class_=f"badge {style}"
    )


def _explanation() -> Html:
    return note(
        "Tasks are paired: only those graded in both evaluations count. p is corrected for the "
        "number of environments (Holm). Would show: the smallest true difference, in points, that "
        "so many tasks show four times in five."
    )


def _sentences(compared: Compared) -> Iterator[Html]:
    one, other = compared.sides
    for comparison in compared.comparisons:
        change = comparison.overall
        low, high = change.interval
        said = (
            f": {percent(change.before)} {one} (step {comparison.step_before}), "
            f"{percent(change.after)} {other} (step {comparison.step_after}), "
            f"{points(change.difference)} points ({points(low)} to {points(high)}) "
            f"on {count(change.n_tasks)} tasks"
        )
        name = tag("strong", comparison.name)
        yield tag("li", badge(change.verdict), tag("span", name, said))


def _table(compared: Compared) -> Html:
    rows = [
        (comparison.name, env_key, change)
        for comparison in compared.comparisons
        for env_key, change in table_changes(comparison)
    ]
    if not rows:
        return tag("h3", compared.caption)
    reach = max(round_range(abs(end) for _, _, change in rows for end in change.interval))
    left_out = sum(comparison.overall.n_left_out for comparison in compared.comparisons)
    return join(
        table(
            compared.caption,
            _columns(compared.sides),
            (_row(name, env_key, change, reach) for name, env_key, change in rows),
            strong=[at for at, (_, env_key, _) in enumerate(rows) if env_key == "all"],
        ),
        note(f"{count(left_out)} tasks without a known grade on both sides are left out.")
        if left_out
        else None,
        note(said) if (said := interval_note(compared.comparisons)) else None,
    )


def _columns(sides: tuple[str, str]) -> list[Column]:
    one, other = (side.capitalize() for side in sides)
    return columns(
        *("Set", "Environment", "Tasks", one, other, "Points", "95 % interval", ""),
        *("p", "Would show", "Verdict"),
        text=("Set", "Environment", "Verdict"),
        draw=("",),
    )


def _row(name: str, env_key: str, change: Change, reach: float) -> list[Child]:
    low, high = change.interval
    return [
        name,
        env_key,
        count(change.n_tasks),
        percent(change.before),
        percent(change.after),
        points(change.difference),
        f"{points(low)} to {points(high)}",
        interval_cell(low, change.difference, high, reach=reach),
        "< 0.001" if change.corrected_p_value < 0.001 else f"{change.corrected_p_value:.3f}",
        f"{100 * change.detectable:.1f}",
        badge(change.verdict),
    ]
