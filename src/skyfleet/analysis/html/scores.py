"""Scores: how good a policy was at its last evaluation of each set."""

from __future__ import annotations

from skyfleet.analysis.html.blocks import columns, table
from skyfleet.analysis.html.markup import Child, Html
from skyfleet.analysis.html.shown_run import ShownRun
from skyfleet.analysis.html.wording import NOTHING, count, number, percent
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import EnvScore


def score_table(run: ShownRun) -> Html:
    head = columns(
        *("Set", "Environment", "Tasks", "Attempts", "Unknown", "pass@1", "95 % interval"),
        *("pass@k", "pass^k", "Mean reward"),
        text=("Set", "Environment"),
    )
    reports = [by_step[max(by_step)] for by_step in run.reports.values()]
    rows = [
        _row(report, env_key, score)
        for report in reports
        for env_key, score in {**report.by_env, "all": report.overall}.items()
        if env_key != "all" or len(report.by_env) > 1
    ]
    return table(f"{run.title}: last evaluation of each set", head, rows)


def _row(report: EvalReport, env_key: str, score: EnvScore) -> list[Child]:
    known = score.success_rate is not None
    k = max(score.pass_at_k, default=1)
    return [
        f"{report.name}, step {report.step}",
        env_key,
        count(score.n_tasks),
        count(score.n_attempts),
        count(score.n_unknown),
        NOTHING if score.success_rate is None else percent(score.success_rate),
        f"{percent(score.interval[0])} to {percent(score.interval[1])}" if known else NOTHING,
        f"{percent(score.pass_at_k[k])} (k={k})" if k > 1 else NOTHING,
        f"{percent(score.pass_hat_k[k])} (k={k})" if k > 1 else NOTHING,
        NOTHING if score.mean_reward is None else number(score.mean_reward),
    ]
