"""Tables of scores and of changes: markdown that reads as well in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isinf

from skyfleet.evaluation.baselines import Baseline
from skyfleet.evaluation.compare import LEVEL, Change, Comparison, Verdict
from skyfleet.evaluation.report import EvalReport

_TEXT = ("set", "environment", "part", "verdict")
_HEADER = (
    "set",
    "environment",
    "tasks",
    "pass@1 before",
    "after",
    "difference",
    "95 % interval",
    "verdict",
)
_EVIDENCE_HEADER = (
    "set",
    "environment",
    "tasks",
    "before",
    "after",
    "difference",
    "95 % interval",
    "p",
    "verdict",
    "detectable",
    "needed",
)
_NOTE = (
    "Differences are in percentage points; p is corrected over the environments (Holm). "
    "detectable: the\nsmallest true change that so many tasks show four times in five; "
    "needed: tasks (x attempts) that would so\nshow the difference seen."
)


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """One row per set and environment, and an `all` row for a set with several.

    Differences and their intervals are in percentage points.
    """
    table = _markdown(_HEADER, list(_rows(comparisons, _row)))
    if left_out := sum(comparison.overall.n_left_out for comparison in comparisons):
        table += f"\nTasks left out, for want of a known grade before and after: {left_out}.\n"
    if note := interval_note(comparisons):
        table += f"\n{note}\n"
    return table


def evidence_table(comparisons: Sequence[Comparison]) -> str:
    """The same rows with p, the smallest change they could have shown, and what it would take."""
    table = _markdown(_EVIDENCE_HEADER, list(_rows(comparisons, _evidence_row)))
    notes = filter(None, (_NOTE, interval_note(comparisons)))
    return "\n".join((table, *notes, ""))


def interval_note(comparisons: Sequence[Comparison]) -> str | None:
    """Why an interval leaves out 0 beside a verdict that sees no change; None where none does."""
    odd = [
        change
        for comparison in comparisons
        for _, change in table_changes(comparison)
        if change.corrected_p_value >= LEVEL and not change.interval[0] <= 0 <= change.interval[1]
    ]
    if not odd:
        return None
    reasons = []
    if any(change.p_value < LEVEL for change in odd):
        reasons.append("verdicts are corrected over the environments (Holm), intervals are not")
    if any(change.p_value >= LEVEL for change in odd):
        reasons.append("a verdict's test asks for more than the interval does")
    return f"Where an interval leaves out 0 and the verdict sees no change: {'; '.join(reasons)}."


def score_table(reports: Sequence[EvalReport]) -> str:
    """Every environment of every set, then its other parts, then the whole; unknown grades apart.

    k is the most attempts at a task; a set of single attempts has no pass@k column.
    """
    k = max((max(report.overall.pass_at_k, default=1) for report in reports), default=1)
    many = (f"pass@{k}", f"pass^{k}") if k > 1 else ()
    header = ("set", "part", "tasks", "pass@1", "95 % interval", *many, "mean score", "unknown")
    rows = [row for report in reports for row in _score_rows(report, k)]
    return _markdown((*header, "null", "oracle"), rows)


def _score_rows(report: EvalReport, k: int) -> Iterator[tuple[str, ...]]:
    parts = [
        *(
            (env_key, score, report.baselines.get(env_key))
            for env_key, score in report.by_env.items()
        ),
        *((part, score, None) for part, score in report.by_difficulty.items()),
        *((part, score, None) for part, score in report.by_exposure.items()),
        ("all", report.overall, None),
    ]
    for part, score, baseline in parts:
        many = (_share(score.pass_at_k.get(k)), _share(score.pass_hat_k.get(k))) if k > 1 else ()
        low, high = score.interval
        yield (
            report.name,
            part,
            str(score.n_tasks),
            _share(score.success_rate),
            f"{100 * low:.1f} to {100 * high:.1f}" if score.n_tasks else "",
            *many,
            "" if score.mean_reward is None else f"{score.mean_reward:.3f}",
            str(score.n_unknown),
            *_baseline_cells(baseline),
        )


def _baseline_cells(baseline: Baseline | None) -> tuple[str, str]:
    if baseline is None:
        return "", ""
    return _share(baseline.null_rate), _share(baseline.oracle_rate)


def _rows(
    comparisons: Sequence[Comparison], row: Callable[[str, str, Change], tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:
    for comparison in comparisons:
        for env_key, change in table_changes(comparison):
            yield row(comparison.name, env_key, change)


def table_changes(comparison: Comparison) -> Iterator[tuple[str, Change]]:
    """What has a row: every environment, and `all` where there are several."""
    yield from comparison.by_env.items()
    if len(comparison.by_env) > 1:
        yield "all", comparison.overall


def _row(name: str, env_key: str, change: Change) -> tuple[str, ...]:
    low, high = change.interval
    return (
        name,
        env_key,
        str(change.n_tasks),
        _share(change.before),
        _share(change.after),
        points(change.difference),
        f"{points(low)} to {points(high)}",
        change.verdict.value,
    )


def _evidence_row(name: str, env_key: str, change: Change) -> tuple[str, ...]:
    *cells, verdict = _row(name, env_key, change)
    needed = "" if change.tasks_needed is None else f"{change.tasks_needed:,}"
    if change.tasks_needed is not None and change.attempts > 1:
        needed += f" x {change.attempts}"
    return (
        *cells,
        f"{change.corrected_p_value:.2g}",
        verdict,
        "none" if isinf(change.detectable) else f"{100 * change.detectable:.1f}",
        needed,
    )


def points(difference: float) -> str:
    # Adding zero makes -0.0 a plain zero.
    return f"{round(100 * difference, 1) + 0.0:+.1f}"


def _share(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.1f} %"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Numbers are set to the right."""
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *escaped, strict=True)]
    rule = [
        "-" * width if name in _TEXT else "-" * (width - 1) + ":"
        for name, width in zip(header, widths, strict=True)
    ]
    lines = (
        " | ".join(
            cell.ljust(width) if name in _TEXT else cell.rjust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        )
        for cells in (header, rule, *escaped)
    )
    return "".join(f"| {line} |\n" for line in lines)


def conclude(comparison: Comparison) -> str:
    """What is shown environment by environment, and then over all."""
    shown = {
        verdict: [env for env, change in comparison.by_env.items() if change.verdict is verdict]
        for verdict in (Verdict.IMPROVED, Verdict.REGRESSED)
    }
    found = [f"{verdict}: {', '.join(envs)}." for verdict, envs in shown.items() if envs]
    if not found:
        found = ["No environment is shown to have changed."]
    return " ".join([f"{comparison.name}:", *found, _overall(comparison.overall)])


def _overall(change: Change) -> str:
    seen = (
        f"Overall {points(change.difference)} points on {change.n_tasks} tasks, "
        f"p = {change.p_value:.2g}"
    )
    if change.verdict in (Verdict.IMPROVED, Verdict.REGRESSED):
        return f"{seen}: {change.verdict}."
    if isinf(change.detectable):
        return f"{seen}: so few tasks would show no change at all."
    could = f"{seen}: so many reliably show a true change of {100 * change.detectable:.1f} points or more"
    if change.tasks_needed is None:
        return f"{could}."
    return f"{could}; the one seen would need {change.tasks_needed:,} tasks."
