"""Tables of scores and comparisons, in Markdown that is readable in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isinf

from skyfleet.evaluation.baselines import Baseline
from skyfleet.evaluation.compare import LEVEL, Change, Comparison, Verdict, describe_left_out
from skyfleet.evaluation.report import EvalReport
from skyfleet.terminal import sanitize

_TEXT = ("set", "environment", "attempts", "part", "verdict")
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
_K_HEADER = (
    "set",
    "attempts",
    "tasks",
    "before",
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
    "detectable: the\nsmallest true change that these tasks detect with 80 % power; "
    "needed: tasks (x attempts) to detect the\nobserved difference with 80 % power."
)


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """One row per set and environment, and an `all` row for a set with several.

    Differences and their intervals are in percentage points.
    """
    table = _markdown(_HEADER, list(_rows(comparisons, _row))) + k_attempts_table(comparisons)
    for sentence in describe_left_out(comparisons):
        table += f"\n{sentence}\n"
    if note := interval_note(comparisons):
        table += f"\n{note}\n"
    return table


def evidence_table(comparisons: Sequence[Comparison]) -> str:
    """The same rows with p, the smallest detectable change and the number of tasks needed."""
    table = _markdown(_EVIDENCE_HEADER, list(_rows(comparisons, _evidence_row)))
    notes = filter(None, (_NOTE, interval_note(comparisons)))
    return "\n".join((table + k_attempts_table(comparisons), *notes, ""))


def k_attempts_table(comparisons: Sequence[Comparison]) -> str:
    """pass@k and pass^k of each set with several attempts per task; empty without one."""
    rows = [
        _row(comparison.name, name, change)
        for comparison in comparisons
        for name, change in comparison.by_k.items()
    ]
    return f"\n{_markdown(_K_HEADER, rows)}" if rows else ""


def interval_note(comparisons: Sequence[Comparison]) -> str | None:
    """Why an interval excludes 0 although the change is not significant; None if none does."""
    conflicting = [
        change
        for comparison in comparisons
        for _, change in table_changes(comparison)
        if change.corrected_p_value >= LEVEL and not change.interval[0] <= 0 <= change.interval[1]
    ]
    if not conflicting:
        return None
    reasons = []
    if any(change.p_value < LEVEL for change in conflicting):
        reasons.append("verdicts are corrected over the environments (Holm) and intervals are not")
    if any(change.p_value >= LEVEL for change in conflicting):
        reasons.append("the test behind the verdict is stricter than the interval")
    return f"Some intervals exclude 0 without a significant change: {'; '.join(reasons)}."


def score_table(reports: Sequence[EvalReport]) -> str:
    """Per set: its environments, difficulties and exposures, then all; unknown grades separately.

    k is the largest number of attempts per task; single attempts have no pass@k column.
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
    """The rows of a table: every environment, and `all` if there are several."""
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
    # Adding zero turns -0.0 into 0.0.
    return f"{round(100 * difference, 1) + 0.0:+.1f}"


def _share(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.1f} %"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Numbers are right-aligned."""
    escaped = [[sanitize(cell).replace("|", r"\|") for cell in row] for row in rows]
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
    """One line: which environments changed, and the overall result."""
    changed = {
        verdict: [env for env, change in comparison.by_env.items() if change.verdict is verdict]
        for verdict in (Verdict.IMPROVED, Verdict.REGRESSED)
    }
    sentences = [f"{verdict}: {', '.join(envs)}." for verdict, envs in changed.items() if envs]
    if not sentences:
        sentences = ["No environment changed significantly."]
    return " ".join([f"{comparison.name}:", *sentences, _overall(comparison.overall)])


def _overall(change: Change) -> str:
    result = (
        f"Overall {points(change.difference)} points on {change.n_tasks} tasks, "
        f"p = {change.p_value:.2g}"
    )
    if change.verdict in (Verdict.IMPROVED, Verdict.REGRESSED):
        return f"{result}: {change.verdict}."
    if isinf(change.detectable):
        return f"{result}: too few tasks to detect any change."
    detectable = f"{result}: these tasks detect a true change of {100 * change.detectable:.1f} points or more"
    if change.tasks_needed is None:
        return f"{detectable}."
    return f"{detectable}; the observed one would need {change.tasks_needed:,} tasks."
