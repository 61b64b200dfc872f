"""Tables of a sweep in Markdown: its plan, its verdicts and its scores against the data size."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.analysis.formatting import NOTHING, table
from skyfleet.evaluation.compare_seeds import SeedScore
from skyfleet.evaluation.table import points
from skyfleet.sweeps.plan import SweepPlan
from skyfleet.sweeps.record import SweepRecord, find_state
from skyfleet.sweeps.results import SweepResults, VariantResult

METHOD = (
    "Each row pairs the same evaluation tasks and seeds, at the last step of every run. Intervals and p "
    "count the variation between tasks and between seeds (Clark's min F'; with one seed only between "
    "tasks, so that nothing is known about other seeds). p is corrected over all {n} comparisons of an "
    "evaluation set (Holm); intervals are not corrected."
)


_VERDICT_HEADER = (
    *("set", "setting", "baseline", "tasks", "seeds", "baseline pass@1", "pass@1"),
    *("difference", "95 % interval", "p", "verdict"),
)
_SCORE_HEADER = (
    *("set", "setting", "training tasks", "steps", "seeds", "before RL", "pass@1"),
    *("95 % interval", "by seed"),
)


def format_plan(plan: SweepPlan, record: SweepRecord) -> str:
    """The runs, and what they cost in episodes and, once a run has finished, in time."""
    n_eval_tasks = plan.count_eval_tasks()
    rows, totals, left, done = [], [0, 0], 0, [0, 0.0]
    for run in plan.runs:
        state = find_state(run, record)
        training = run.training_episodes or 0
        evaluation = run.count_evaluation_episodes(n_eval_tasks) or 0
        totals = [totals[0] + training, totals[1] + evaluation]
        if state == "finished":
            done = [done[0] + training + evaluation, done[1] + record.get(run.name).seconds]
        else:
            left += training + evaluation
        rows.append(
            (
                run.name,
                plan.grid.describe(run.variant),
                str(run.seed),
                _count(run.n_tasks),
                _count(run.total_steps),
                _count(training or None),
                _count(evaluation or None),
                state,
            )
        )
    header = ("run", "setting", "seed", "tasks", "steps", "episodes", "evaluation", "state")
    lines = [
        table(header, rows),
        "",
        f"{len(plan.runs)} runs: {_count_episodes(plan, totals)}.",
    ]
    if done[0] and done[1] and left:
        seconds = left * done[1] / done[0]
        lines.append(
            f"What is left takes about {seconds / 60:.0f} minutes, as long as the finished runs took."
        )
    elif left:
        lines.append("The time is known after the first run.")
    return "\n".join(lines)


def _count_episodes(plan: SweepPlan, totals: Sequence[int]) -> str:
    if any(run.training_episodes is None for run in plan.runs):
        return "their episodes are not known here, where the data is not"
    return f"{totals[0]:,} training and {totals[1]:,} evaluation episodes"


def format_results(results: SweepResults) -> str:
    parts = [*_verdict_part(results), *_scaling_part(results), *results.notes]
    if not parts:
        parts = [_score_table(results)]
    return "\n\n".join(parts) + "\n"


def _verdict_part(results: SweepResults) -> list[str]:
    rows = [
        (
            one.set_name,
            one.variant.label,
            one.baseline.label,
            str(one.compared.change.n_tasks),
            str(len(one.compared.seeds)),
            percent(one.compared.change.before),
            percent(one.compared.change.after),
            points(one.compared.change.difference),
            " to ".join(map(points, one.compared.change.interval)),
            f"{one.compared.change.corrected_p_value:.2g}",
            one.compared.change.verdict.value,
        )
        for one in results.verdicts
    ]
    if not rows:
        return []
    return [table(_VERDICT_HEADER, rows), METHOD.format(n=results.n_comparisons)]


def _scaling_part(results: SweepResults) -> list[str]:
    return [_score_table(results)] if results.plan.grid.data_sizes else []


def _score_table(results: SweepResults) -> str:
    rows = [
        (name, *_score_cells(variant, name))
        for name in results.set_names
        for variant in results.variants
    ]
    return table(_SCORE_HEADER, rows)


def _score_cells(variant: VariantResult, set_name: str) -> Sequence[str]:
    curve = dict(variant.curve(set_name))
    before, score = curve.get(0), variant.score(set_name)
    steps = ", ".join(map(str, variant.steps)) or NOTHING
    head = (variant.label, _count(variant.n_tasks), steps)
    if score is None:
        return (*head, "0", NOTHING, NOTHING, NOTHING, NOTHING)
    return (
        *head,
        str(len(score.rate_by_seed)),
        NOTHING if before is None else percent(before.rate),
        percent(score.rate),
        format_interval(score),
        ", ".join(f"{100 * rate:.1f}" for rate in score.rate_by_seed.values()),
    )


def percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def format_interval(score: SeedScore) -> str:
    return " to ".join(f"{100 * end:.1f}" for end in score.interval)


def _count(number: int | None) -> str:
    return NOTHING if number is None else f"{number:,}"
