"""Model selection: which evaluation of a run was the best, decided by a significance test.

The first evaluation is the incumbent. A later one replaces it if a one-sided paired test over tasks
shows that it is better, at its share of a significance level of 5 %. The shares of all comparisons
add up to at most 5 %, however many there are, so a run that never improves keeps its first step in
95 of 100 runs (union bound: the comparisons share the incumbent's sample, so they are dependent).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import difference_and_p, pair_tasks
from skyfleet.evaluation.report import EvalReport

ALPHA = 0.05
_ZETA = 2.612375348685488
"""The sum of k ** -1.5 over k = 1, 2, ...: the shares decrease slowly and have a finite sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One evaluation, compared with the incumbent at that time."""

    step: int
    incumbent_step: int
    difference: float
    p_value: float
    """One-sided, against the null that the candidate is not better."""
    alpha: float
    """Its share of the 5 %; a p-value below it replaces the incumbent."""

    @property
    def is_better(self) -> bool:
        return self.p_value < self.alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSelection:
    step: int
    candidates: tuple[Candidate, ...]


def select_best_step(reports: Sequence[EvalReport], *, alpha: float = ALPHA) -> ModelSelection:
    """Select the best step from the reports of one set, in the order of their steps.

    Skips reports without a grade, reports that share no graded task with the incumbent, and reports
    graded by other code than the last one. A later report of the same code never changes the result of
    an earlier comparison, so it can be called after each one.
    """
    graded = [r for r in reports if any(outcome.rewards for outcome in r.outcomes.values())]
    graded = [report for report in graded if not report.find_changed_code(graded[-1])]
    if not graded:
        raise TaskError(
            f"none of {len(reports)} reports has a graded task; evaluate again and see why grading "
            "fails"
        )
    incumbent, *others = graded
    candidates: list[Candidate] = []
    for report in others:
        try:
            difference, p_value = difference_and_p(pair_tasks(incumbent, report))
        except TaskError:
            continue
        # Both tests are symmetric: half of the two-sided p lies on the observed side.
        half = p_value / 2
        candidate = Candidate(
            step=report.step,
            incumbent_step=incumbent.step,
            difference=difference,
            p_value=half if difference > 0 else 1 - half,
            alpha=alpha * (len(candidates) + 1) ** -1.5 / _ZETA,
        )
        candidates.append(candidate)
        if candidate.is_better:
            incumbent = report
    return ModelSelection(step=incumbent.step, candidates=tuple(candidates))


def describe_best_step(set_name: str, step: int) -> str:
    """The sentence under a table that compares step 0 with a later one."""
    kept = " (no later step is significantly better)" if step == 0 else ""
    return f"Best step, by {set_name}: {step}{kept}."
