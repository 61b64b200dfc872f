"""Scores: how good a policy was at its last evaluation of each set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from skyfleet.analysis.html.blocks import columns, fold, paragraphs, table
from skyfleet.analysis.html.markup import Child, Html, join
from skyfleet.analysis.html.shown_run import ShownRun
from skyfleet.analysis.html.wording import NOTHING, count, number, percent
from skyfleet.evaluation.baselines import Baseline, baseline_faults
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import EnvScore

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
