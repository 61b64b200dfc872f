"""Verdicts: what changed in each set, with intervals, and whether chance could have done it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from skyfleet.analysis.html.bars import interval_cell
from skyfleet.analysis.html.behaviour import behaviour_table
from skyfleet.analysis.html.charts import round_range
from skyfleet.analysis.html.elements import (
    Child,
    Column,
    Html,
    columns,
    fold,
    join,
    note,
    paragraphs,
    section,
    table,
    tag,
)
from skyfleet.analysis.html.formatting import NOTHING, count, number, percent, points
from skyfleet.analysis.html.page_data import Compared, Findings, ShownRun
from skyfleet.evaluation.baselines import Baseline, baseline_faults
from skyfleet.evaluation.compare import Change, Verdict
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import EnvScore
from skyfleet.evaluation.table import interval_note, table_changes

_COUNTS = ("Tasks", "Attempts", "Unknown", "pass@1", "95 % interval")
_BASELINES = ("Doing nothing", "Reference")
_OTHERS = ("pass@k", "pass^k", "Mean reward")

Split = Callable[[EvalReport], Mapping[str, EnvScore]]


def score_tables(run: ShownRun) -> Html:
    """By environment, by whether it was trained on, and, folded, by difficulty."""
    reports = _last_reports(run)
    title = f"{run.title}: last evaluation of each set"
    apart = _split(
        f"{title}, trained and held-out environments apart",
        reports,
        lambda report: report.by_exposure,
    )
    difficulty = _split(f"{title}, by difficulty", reports, lambda report: report.by_difficulty)
    return join(
        _by_env(title, reports),
        apart,
        fold(f"{run.title}: by difficulty", difficulty) if difficulty else None,
    )


def score_faults(run: ShownRun) -> Html:
    """A sentence for each environment whose score does not mean what it says."""
    return paragraphs(
        f"{run.mark} {report.name}: {fault}.".strip()
        for report in _last_reports(run)
        for fault in baseline_faults(report.baselines)
    )


def _last_reports(run: ShownRun) -> list[EvalReport]:
    return [by_step[max(by_step)] for by_step in run.reports.values()]


def _by_env(caption: str, reports: Sequence[EvalReport]) -> Html:
    names = "Set", "Environment", *_COUNTS, *_BASELINES, *_OTHERS
    rows = [
        _row(report, env_key, score, baseline=_baseline(report.baselines.get(env_key)))
        for report in reports
        for env_key, score in {**report.by_env, "all": report.overall}.items()
        if env_key != "all" or len(report.by_env) > 1
    ]
    return table(caption, columns(*names, text=names[:2]), rows)


def _split(caption: str, reports: Sequence[EvalReport], split: Split) -> Html | None:
    rows = [
        _row(report, part, score) for report in reports for part, score in split(report).items()
    ]
    names = "Set", "Part", *_COUNTS, *_OTHERS
    return table(caption, columns(*names, text=names[:2]), rows) if rows else None


def _row(
    report: EvalReport, name: str, score: EnvScore, *, baseline: Sequence[str] = ()
) -> list[Child]:
    known = score.success_rate is not None
    k = max(score.pass_at_k, default=1)
    return [
        f"{report.name}, step {report.step}",
        name,
        count(score.n_tasks),
        count(score.n_attempts),
        count(score.n_unknown),
        _rate(score.success_rate),
        f"{percent(score.interval[0])} to {percent(score.interval[1])}" if known else NOTHING,
        *baseline,
        f"{percent(score.pass_at_k[k])} (k={k})" if k > 1 else NOTHING,
        f"{percent(score.pass_hat_k[k])} (k={k})" if k > 1 else NOTHING,
        NOTHING if score.mean_reward is None else number(score.mean_reward),
    ]


def _baseline(baseline: Baseline | None) -> list[str]:
    """What doing nothing and the reference solution pass on the same tasks."""
    if baseline is None:
        return [NOTHING, NOTHING]
    return [_rate(baseline.null_rate), _rate(baseline.oracle_rate)]


def _rate(rate: float | None) -> str:
    return NOTHING if rate is None else percent(rate)


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
            (_verdicts_row(name, env_key, change, reach) for name, env_key, change in rows),
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


def _verdicts_row(name: str, env_key: str, change: Change, reach: float) -> list[Child]:
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
