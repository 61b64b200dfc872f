"""Comparison: did a policy get better, task by task, and could we have seen it?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One task, before and after."""

    env_key: str
    before: float
    after: float
    attempts: int
    """Of each side that are tested: the fewer of the two."""
    tested: float
    """The difference between so many attempts of each; those of the other side are drawn."""
    uneven: bool
    """One side has more attempts."""

    @property
    def difference(self) -> float:
        return self.after - self.before


def pair_tasks(before: EvalReport, after: EvalReport) -> list[Pair]:
    """The tasks with a known grade in both; a TaskError where there is none."""
    if before.pass_threshold != after.pass_threshold:
        raise TaskError(
            f"{before.name!r} at step {before.step} counts a reward of {before.pass_threshold:g} "
            f"as a pass and {after.name!r} at step {after.step} one of {after.pass_threshold:g}; "
            "evaluate both with the same threshold"
        )
    common = sorted(before.outcomes.keys() & after.outcomes.keys())
    both = [(before.outcomes[task_key], after.outcomes[task_key]) for task_key in common]
    both = [(one, other) for one, other in both if one.rewards and other.rewards]
    if not both:
        raise TaskError(
            f"{before.name!r} at step {before.step} and {after.name!r} at step {after.step} have "
            "no task graded in both; see why grades are missing, or evaluate both on the same tasks"
        )
    # The same two reports draw the same; any others draw afresh, so that no task has a bias.
    counts = [(o.successes, o.attempts) for pair in both for o in pair]
    rng = Random(f"{common}{counts}")
    return [_pair(one, other, rng) for one, other in both]


def difference_and_p(pairs: Sequence[Pair]) -> tuple[float, float]:
    """The mean difference, and its two-sided p: McNemar's for single attempts, else sign-flip."""
    # Rounded, so that thirds which cancel are a plain zero.
    difference = round(fmean(pair.difference for pair in pairs), 12)
    tested = [pair.tested for pair in pairs]
    if difference * sum(tested) <= 0:
        return difference, 1.0  # what was drawn for the test does not bear it out
    if all(pair.attempts == 1 for pair in pairs):
        return difference, mcnemar_exact(tested.count(1.0), tested.count(-1.0))
    return difference, sign_flip(tested)


def _pair(before: TaskOutcome, after: TaskOutcome, rng: Random) -> Pair:
    # One attempt against eight is lopsided where nothing changed, and no test here allows for it.
    attempts = min(before.attempts, after.attempts)
    passed = [_drawn(outcome, attempts, rng) for outcome in (before, after)]
    return Pair(
        env_key=before.env_key,
        before=before.success_rate,
        after=after.success_rate,
        attempts=attempts,
        tested=(passed[1] - passed[0]) / attempts,
        uneven=before.attempts != after.attempts,
    )


def _drawn(outcome: TaskOutcome, attempts: int, rng: Random) -> int:
    """Successes among so many of its attempts."""
    if attempts == outcome.attempts:
        return outcome.successes
    drawn = rng.sample(range(outcome.attempts), attempts)
    return sum(attempt < outcome.successes for attempt in drawn)


LEVEL = 0.05
"""A p below it is significant."""


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
    """At a task, the most that are tested."""
    n_uneven: int = 0
    """Tasks with more attempts in one report; as many as the other has are drawn for the test."""

    @property
    def rollouts_needed(self) -> int | None:
        """Of each of the two policies, with as many attempts at a task as here."""
        return None if self.tasks_needed is None else self.tasks_needed * self.attempts

    @property
    def verdict(self) -> Verdict:
        if self.corrected_p_value < LEVEL:
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
    pairs = pair_tasks(before, after)
    by_env: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_env[pair.env_key].append(pair)
    tasks = {**after.outcomes, **before.outcomes}
    left_out = Counter(outcome.env_key for outcome in tasks.values())
    left_out.subtract(pair.env_key for pair in pairs)
    changes = {env_key: _change(by_env[env_key], left_out[env_key]) for env_key in sorted(by_env)}
    return Comparison(
        name=after.name,
        step_before=before.step,
        step_after=after.step,
        overall=_change(pairs, left_out.total()),
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
    difference, p_value = difference_and_p(pairs)
    attempts = max(pair.attempts for pair in pairs)
    discordance = max(fmean(pair.tested**2 for pair in pairs), difference**2)
    return Change(
        n_tasks=len(pairs),
        n_left_out=n_left_out,
        before=fmean(pair.before for pair in pairs),
        after=fmean(pair.after for pair in pairs),
        difference=difference,
        interval=paired_difference([pair.difference for pair in pairs]),
        p_value=p_value,
        corrected_p_value=p_value,
        detectable=detectable_difference(len(pairs), discordance, attempts=attempts),
        tasks_needed=tasks_needed(difference, discordance, attempts=attempts)
        if difference
        else None,
        attempts=attempts,
        n_uneven=sum(pair.uneven for pair in pairs),
    )
