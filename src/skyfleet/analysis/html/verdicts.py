"""Verdicts section: comparisons with intervals and verdicts, and the scores of each set."""

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
from skyfleet.analysis.html.page_data import ComparisonTable, ReportRun, RunFindings
from skyfleet.evaluation.baselines import Baseline, baseline_faults
from skyfleet.evaluation.compare import Change, Verdict
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import EnvScore
from skyfleet.evaluation.table import interval_note, table_changes

_COUNTS = ("Tasks", "Attempts", "Unknown", "pass@1", "95 % interval")
_BASELINES = ("Null agent", "Reference")
_OTHERS = ("pass@k", "pass^k", "Mean reward")
PartFn = Callable[[EvalReport], Mapping[str, EnvScore]]
_BADGES = {
    Verdict.IMPROVED: ("▲", "up", "significantly higher"),
    Verdict.REGRESSED: ("▼", "down", "significantly lower"),
    Verdict.SATURATED: ("●", "flat", "both rates are at least 95 %"),
    Verdict.FAILING: ("○", "flat", "both rates are at most 5 %"),
    Verdict.UNDERPOWERED: (
        "?",
        "flat",
        "too few tasks: a change of 10 points would often be missed",
    ),
    Verdict.NO_EVIDENCE: ("=", "flat", "a change of 10 points would probably have been detected"),
}


def score_tables(run: ReportRun) -> Html:
    """By environment, by exposure in training, and in a fold by difficulty."""
    reports = _last_reports(run)
    title = f"{run.title}: last evaluation of each set"
    exposure = _part_table(
        f"{title}, trained and held-out environments",
        reports,
        lambda report: report.by_exposure,
    )
    difficulty = _part_table(
        f"{title}, by difficulty", reports, lambda report: report.by_difficulty
    )
    return join(
        _env_table(title, reports),
        exposure,
        fold(f"{run.title}: by difficulty", difficulty) if difficulty else None,
    )


def baseline_notes(run: ReportRun) -> Html:
    """One sentence per environment whose score is misleading."""
    return paragraphs(
        f"{run.mark} {report.name}: {sentence}.".strip()
        for report in _last_reports(run)
        for sentence in baseline_faults(report.baselines)
    )


def _last_reports(run: ReportRun) -> list[EvalReport]:
    return [by_step[max(by_step)] for by_step in run.reports.values()]


def _env_table(caption: str, reports: Sequence[EvalReport]) -> Html:
    names = "Set", "Environment", *_COUNTS, *_BASELINES, *_OTHERS
    rows = [
        _score_row(report, env_key, score, baseline=_baseline(report.baselines.get(env_key)))
        for report in reports
        for env_key, score in {**report.by_env, "all": report.overall}.items()
        if env_key != "all" or len(report.by_env) > 1
    ]
    return table(caption, columns(*names, text=names[:2]), rows)


def _part_table(caption: str, reports: Sequence[EvalReport], split: PartFn) -> Html | None:
    rows = [
        _score_row(report, part, score)
        for report in reports
        for part, score in split(report).items()
    ]
    names = "Set", "Part", *_COUNTS, *_OTHERS
    return table(caption, columns(*names, text=names[:2]), rows) if rows else None


def _score_row(
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
    """Pass rates of the null agent and of the reference solution."""
    if baseline is None:
        return [NOTHING, NOTHING]
    return [_rate(baseline.null_rate), _rate(baseline.oracle_rate)]


def _rate(rate: float | None) -> str:
    return NOTHING if rate is None else percent(rate)


def headline(tables: Sequence[ComparisonTable]) -> Html:
    """One sentence per set, at the top of the page."""
    return join(
        tag("ul", _sentences(one), class_="headline", aria_label=one.caption) for one in tables
    )


def verdict_section(findings: Sequence[RunFindings], tables: Sequence[ComparisonTable]) -> Html:
    """Changes of the scores and of the behaviour."""
    evaluated = [one.run for one in findings if one.run.reports]
    scores = [score_tables(run) for run in evaluated]
    if not scores:
        return section("verdicts", "Verdicts", note("No evaluations are recorded."))
    body: list[Child] = [join(_comparison_table(one), paragraphs(one.notes)) for one in tables]
    if not tables:
        body.append(note("Each set was evaluated only once, so there is nothing to compare."))
    meanings = [
        tag("div", tag("dt", badge(verdict)), tag("dd", meaning))
        for verdict, (_, _, meaning) in _BADGES.items()
    ]
    return section(
        "verdicts",
        "Verdicts",
        *body,
        [baseline_notes(run) for run in evaluated],
        [part for one in findings if (part := behaviour_table(one))],
        fold("What the columns and verdicts mean", _explanation(), tag("dl", meanings)),
        fold("Scores of the last evaluation", scores, opened=not tables),
    )


def badge(verdict: Verdict) -> Html:
    sign, style, _ = _BADGES[verdict]
    return tag(
        "span", tag("span", sign, aria_hidden="true"), f" {verdict}", class_=f"badge {style}"
    )


def _explanation() -> Html:
    return note(
        "Tasks are paired: only those graded in both evaluations count. p is corrected for the "
        "number of environments (Holm). pass@k: one of k attempts at a task passes; pass^k: all of "
        "them do. Detectable: the smallest true difference, in points, that "
        "these tasks detect with 80 % power."
    )


def _sentences(compared: ComparisonTable) -> Iterator[Html]:
    one, other = compared.sides
    for comparison in compared.comparisons:
        change = comparison.overall
        low, high = change.interval
        text = (
            f": {percent(change.before)} {one} (step {comparison.step_before}), "
            f"{percent(change.after)} {other} (step {comparison.step_after}), "
            f"{points(change.difference)} points ({points(low)} to {points(high)}) "
            f"on {count(change.n_tasks)} tasks"
        )
        name = tag("strong", comparison.name)
        yield tag("li", badge(change.verdict), tag("span", name, text))


def _comparison_table(compared: ComparisonTable) -> Html:
    rows = [
        (comparison.name, env_key, change)
        for comparison in compared.comparisons
        for env_key, change in (*table_changes(comparison), *comparison.by_k.items())
    ]
    if not rows:
        return tag("h3", compared.caption)
    half_width = max(round_range(abs(end) for _, _, change in rows for end in change.interval))
    changed = sum(comparison.overall.n_changed for comparison in compared.comparisons)
    left_out = sum(comparison.overall.n_left_out for comparison in compared.comparisons) - changed
    return join(
        table(
            compared.caption,
            _columns(compared.sides),
            (_change_row(name, env_key, change, half_width) for name, env_key, change in rows),
            strong=[at for at, (_, env_key, _) in enumerate(rows) if env_key == "all"],
        ),
        note(f"{count(left_out)} tasks that are not graded on both sides are left out.")
        if left_out
        else None,
        note(f"{count(changed)} tasks whose content differs on both sides are left out.")
        if changed
        else None,
        note(text) if (text := interval_note(compared.comparisons)) else None,
    )


def _columns(sides: tuple[str, str]) -> list[Column]:
    one, other = (side.capitalize() for side in sides)
    return columns(
        *("Set", "Environment", "Tasks", one, other, "Points", "95 % interval", ""),
        *("p", "Detectable", "Verdict"),
        text=("Set", "Environment", "Verdict"),
        draw=("",),
    )


def _change_row(name: str, env_key: str, change: Change, half_width: float) -> list[Child]:
    low, high = change.interval
    return [
        name,
        env_key,
        count(change.n_tasks),
        percent(change.before),
        percent(change.after),
        points(change.difference),
        f"{points(low)} to {points(high)}",
        interval_cell(low, change.difference, high, half_width=half_width),
        "< 0.001" if change.corrected_p_value < 0.001 else f"{change.corrected_p_value:.3f}",
        f"{100 * change.detectable:.1f}",
        badge(change.verdict),
    ]
