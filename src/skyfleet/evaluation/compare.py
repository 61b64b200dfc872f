"""Comparison: did a policy get better, task by task, and could we have seen it?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from skyfleet.errors import TaskError
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import TaskOutcome
from skyfleet.metrics.intervals import paired_difference
from skyfleet.metrics.significance import (
    detectable_difference,
    holm,
    mcnemar_exact,
    sign_flip,
    tasks_needed,
)

Pair = tuple[TaskOutcome, TaskOutcome]
"""One task, before and after."""


class Verdict(StrEnum):
    """What may be said of a change; the first that holds.

    Significant means a corrected p below 0.05; 80 % power is meant at that level, uncorrected.
    """

    IMPROVED = "IMPROVED"
    """Significant, and upwards."""
    REGRESSED = "REGRESSED"
    """Significant, and downwards."""
    SATURATED = "SATURATED"
    """Both success rates are 0.95 or more: nothing is left to gain here."""
    FAILING = "FAILING"
    """Both success rates are 0.05 or less: nothing is gained here yet."""
    UNDERPOWERED = "UNDERPOWERED"
    """A true change of 0.10 would be found in less than 80 % of such evaluations."""
    NO_EVIDENCE = "NO EVIDENCE"
    """A change of 0.10 would probably have been seen, and was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    n_tasks: int
    """Tasks with a known grade in both reports; only these are compared."""
    n_left_out: int
    """The other tasks: of unknown grade in either report, or in one report only."""
    before: float
    after: float
    difference: float
    interval: tuple[float, float]
    """95 % of the difference."""
    p_value: float
    """McNemar's exact test for single attempts, otherwise the sign-flip test over tasks."""
    corrected_p_value: float
    """Holm's, over the environments; the overall test is one and needs none."""
    detectable: float
    """The smallest true difference these tasks would show with 80 % power."""
    tasks_needed: int | None
    """Tasks that would show the observed difference with 80 % power; None for no difference."""
    attempts: int = 1
    """At a task, the most in either report."""

    @property
    def rollouts_needed(self) -> int | None:
        """Of each of the two policies, with as many attempts at a task as here."""
        return None if self.tasks_needed is None else self.tasks_needed * self.attempts

    @property
    def verdict(self) -> Verdict:
        if self.corrected_p_value < 0.05:
            return Verdict.IMPROVED if self.difference > 0 else Verdict.REGRESSED
        if min(self.before, self.after) >= 0.95:
            return Verdict.SATURATED
        if max(self.before, self.after) <= 0.05:
            return Verdict.FAILING
        return Verdict.UNDERPOWERED if self.detectable > 0.10 else Verdict.NO_EVIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    name: str
    step_before: int | None
    step_after: int | None
    """None where published rates do not say."""
    overall: Change
    by_env: Mapping[str, Change]
    """Only environments with a task to compare."""


def compare(before: EvalReport, after: EvalReport) -> Comparison:
    """Pair the two reports by task, and say what changed overall and in each environment."""
    if before.pass_threshold != after.pass_threshold:
        raise TaskError(
            f"{before.name!r} at step {before.step} counts a reward of {before.pass_threshold:g} "
            f"as a pass and {after.name!r} at step {after.step} one of {after.pass_threshold:g}; "
            "evaluate both with the same threshold"
        )
    pairs: dict[str, list[Pair]] = defaultdict(list)
    left_out: dict[str, int] = defaultdict(int)
    for task_key in sorted(before.outcomes.keys() | after.outcomes.keys()):
        one, other = before.outcomes.get(task_key), after.outcomes.get(task_key)
        if one and other and one.rewards and other.rewards:
            pairs[one.env_key].append((one, other))
        elif known := one or other:
            left_out[known.env_key] += 1
    if not pairs:
        raise TaskError(
            f"{before.name!r} at step {before.step} and {after.name!r} at step {after.step} have "
            "no task graded in both; evaluate both on the same tasks"
        )
    changes = {env_key: _change(pairs[env_key], left_out[env_key]) for env_key in sorted(pairs)}
    return Comparison(
        name=after.name,
        step_before=before.step,
        step_after=after.step,
        overall=_change([p for of_env in pairs.values() for p in of_env], sum(left_out.values())),
        by_env=corrected(changes),
    )


def corrected(changes: Mapping[str, Change]) -> dict[str, Change]:
    """The same changes, each p corrected for having asked about all (Holm)."""
    p_values = holm([change.p_value for change in changes.values()])
    return {
        env_key: replace(change, corrected_p_value=p_value)
        for (env_key, change), p_value in zip(changes.items(), p_values, strict=True)
    }


def _change(pairs: Sequence[Pair], n_left_out: int) -> Change:
    before = [one.success_rate for one, _ in pairs]
    after = [other.success_rate for _, other in pairs]
    attempts = max(outcome.attempts for pair in pairs for outcome in pair)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    # Rounded, so that thirds which cancel are a plain zero.
    difference = round(fmean(differences), 12)
    discordance = max(fmean(d * d for d in differences), difference**2)
    if attempts == 1:
        p_value = mcnemar_exact(differences.count(1.0), differences.count(-1.0))
    else:
        p_value = sign_flip(differences)
    return Change(
        n_tasks=len(pairs),
        n_left_out=n_left_out,
        before=fmean(before),
        after=fmean(after),
        difference=difference,
        interval=paired_difference(differences, attempts=attempts),
        p_value=p_value,
        corrected_p_value=p_value,
        detectable=detectable_difference(len(pairs), discordance, attempts=attempts),
        tasks_needed=tasks_needed(difference, discordance) if difference else None,
        attempts=attempts,
    )
