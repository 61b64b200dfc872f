"""Comparison: paired by task, how a success rate changed, with interval, p-value and verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from statistics import fmean

from skyfleet.envs.grading_code import describe_changes
from skyfleet.errors import TaskError
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import TaskOutcome
from skyfleet.metrics.intervals import paired_difference, pass_at_k, pass_hat_k
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
    """Attempts per side in the test: the smaller of the two numbers."""
    tested: float
    """The difference in the test; the side with more attempts is sampled down to `attempts`."""
    uneven: bool
    """Whether one side has more attempts."""

    @property
    def difference(self) -> float:
        return self.after - self.before


def pair_tasks(before: EvalReport, after: EvalReport) -> list[Pair]:
    """Pair the tasks that are graded and the same in both reports; raise TaskError if none is."""
    both = _match_outcomes(before, after)
    # Seeded by the reports: repeatable, and without a fixed bias for or against a task.
    common = sorted(before.outcomes.keys() & after.outcomes.keys())
    counts = [(o.successes, o.attempts) for pair in both for o in pair]
    rng = Random(f"{common}{counts}")
    return [_pair(one, other, rng) for one, other in both]


Outcomes = list[tuple[TaskOutcome, TaskOutcome]]
Estimate = Callable[[int, int, int], float]
"""Of pass@k or pass^k, from the attempts at a task, its successes and k."""


def _match_outcomes(before: EvalReport, after: EvalReport) -> Outcomes:
    if before.pass_threshold != after.pass_threshold:
        raise TaskError(
            f"{before.name!r} at step {before.step} has pass threshold {before.pass_threshold:g} "
            f"and {after.name!r} at step {after.step} has {after.pass_threshold:g}; "
            "evaluate both with the same threshold"
        )
    check_same_code([before, after])
    common = sorted(before.outcomes.keys() & after.outcomes.keys())
    both = [(before.outcomes[task_key], after.outcomes[task_key]) for task_key in common]
    both = [(one, other) for one, other in both if one.rewards and other.rewards]
    n_graded = len(both)
    both = [(one, other) for one, other in both if one.is_same_task(other)]
    if n_graded and not both:
        raise TaskError(
            f"{before.name!r} at step {before.step} and {after.name!r} at step {after.step} have "
            f"no task in common: all {n_graded} with the same key have another content; evaluate "
            "both on the same tasks"
        )
    if not both:
        raise TaskError(
            f"{before.name!r} at step {before.step} and {after.name!r} at step {after.step} have "
            "no task graded in both; see why grades are missing, or evaluate both on the same tasks"
        )
    return both


def check_same_code(reports: Sequence[EvalReport]) -> None:
    """TaskError if different code graded the reports: a difference would not be the policy's."""
    for other in reports[1:]:
        if changed := reports[0].find_changed_code(other):
            first = reports[0]
            raise TaskError(
                f"{first.name!r} at step {first.step} and {other.name!r} at step {other.step} were "
                f"played and graded by different code ({describe_changes(changed)}), so there is no "
                "verdict; evaluate both with the same code, for a training run in a new folder"
            )


def difference_and_p(pairs: Sequence[Pair]) -> tuple[float, float]:
    """The mean difference and its two-sided p: McNemar's test for single attempts, else sign-flip."""
    # Rounded, so that thirds that cancel give exactly zero.
    difference = round(fmean(pair.difference for pair in pairs), 12)
    tested = [pair.tested for pair in pairs]
    if difference * sum(tested) <= 0:
        return difference, 1.0  # the sampled attempts do not show the difference
    if all(pair.attempts == 1 for pair in pairs):
        return difference, mcnemar_exact(tested.count(1.0), tested.count(-1.0))
    return difference, sign_flip(tested)


def _pair(before: TaskOutcome, after: TaskOutcome, rng: Random) -> Pair:
    # One attempt against eight is asymmetric under the null, which the tests here do not allow.
    attempts = min(before.attempts, after.attempts)
    successes = [_sample_successes(outcome, attempts, rng) for outcome in (before, after)]
    return Pair(
        env_key=before.env_key,
        before=before.success_rate,
        after=after.success_rate,
        attempts=attempts,
        tested=(successes[1] - successes[0]) / attempts,
        uneven=before.attempts != after.attempts,
    )


def _sample_successes(outcome: TaskOutcome, attempts: int, rng: Random) -> int:
    """Successes among `attempts` randomly chosen attempts."""
    if attempts == outcome.attempts:
        return outcome.successes
    drawn = rng.sample(range(outcome.attempts), attempts)
    return sum(attempt < outcome.successes for attempt in drawn)


LEVEL = 0.05
"""A p-value below it is significant."""


class Verdict(StrEnum):
    """The verdict on a change: the first that applies, in this order.

    Significant means a corrected p below 0.05. Power refers to that level without correction.
    """

    IMPROVED = "IMPROVED"
    """Significantly higher."""
    REGRESSED = "REGRESSED"
    """Significantly lower."""
    SATURATED = "SATURATED"
    """Both success rates are at least 0.95, so there is no room for improvement."""
    FAILING = "FAILING"
    """Both success rates are at most 0.05."""
    UNDERPOWERED = "UNDERPOWERED"
    """Power below 80 %: a true change of 0.10 would often be missed."""
    NO_EVIDENCE = "NO EVIDENCE"
    """Power of at least 80 % for a change of 0.10, and no significant change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    n_tasks: int
    """Tasks graded in both reports; only these are compared."""
    n_left_out: int
    """Tasks that are ungraded or changed in a report, or in one report only."""
    before: float
    after: float
    difference: float
    interval: tuple[float, float]
    """95 % interval of the difference."""
    p_value: float
    """McNemar's exact test for single attempts, otherwise the sign-flip test over tasks."""
    corrected_p_value: float
    """Corrected over the environments (Holm); the overall test is a single one."""
    detectable: float
    """The smallest true difference that these tasks detect with 80 % power."""
    tasks_needed: int | None
    """Tasks that would detect the observed difference with 80 % power; None if it is zero."""
    attempts: int = 1
    """The largest number of tested attempts per task."""
    n_uneven: int = 0
    """Tasks with more attempts in one report, which the test samples down."""
    n_changed: int = 0
    """Tasks among those left out that have another content in the other report."""

    @property
    def rollouts_needed(self) -> int | None:
        """Per policy, with the same number of attempts per task."""
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
    """None for published rates, which do not state a step."""
    overall: Change
    by_env: Mapping[str, Change]
    """Environments with at least one task in both reports."""
    by_k: Mapping[str, Change] = field(default_factory=dict)
    """With k attempts per task: `pass@k`, one of k attempts passes, and `pass^k`, all of them do."""


def compare(before: EvalReport, after: EvalReport) -> Comparison:
    """Pair two reports by task and compare them overall and per environment."""
    pairs = pair_tasks(before, after)
    by_env: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_env[pair.env_key].append(pair)
    tasks = {**after.outcomes, **before.outcomes}
    left_out = Counter(outcome.env_key for outcome in tasks.values())
    left_out.subtract(pair.env_key for pair in pairs)
    changed = Counter(
        outcome.env_key
        for task_key, outcome in before.outcomes.items()
        if task_key in after.outcomes and not outcome.is_same_task(after.outcomes[task_key])
    )
    changes = {
        env_key: _change(by_env[env_key], left_out[env_key], changed[env_key])
        for env_key in sorted(by_env)
    }
    return Comparison(
        name=after.name,
        step_before=before.step,
        step_after=after.step,
        overall=_change(pairs, left_out.total(), changed.total()),
        by_env=correct_p_values(changes),
        by_k=_compare_k_attempts(before, after),
    )


def _compare_k_attempts(before: EvalReport, after: EvalReport) -> dict[str, Change]:
    """pass@k and pass^k over the tasks with k attempts on both sides, for the largest such k above 1.

    Their p-values are corrected for being two (Holm).
    """
    both = _match_outcomes(before, after)
    k = max(min(one.attempts, other.attempts) for one, other in both)
    if k < 2:
        return {}
    tested = [pair for pair in both if min(outcome.attempts for outcome in pair) >= k]
    changes = {}
    for name, estimate in ((f"pass@{k}", pass_at_k), (f"pass^{k}", pass_hat_k)):
        rng = Random(f"{name}{[(o.successes, o.attempts) for pair in tested for o in pair]}")
        pairs = [_pair_k(one, other, k, estimate, rng) for one, other in tested]
        changes[name] = _change(pairs, len(both) - len(pairs), 0)
    return correct_p_values(changes)


def _pair_k(
    before: TaskOutcome, after: TaskOutcome, k: int, estimate: Estimate, rng: Random
) -> Pair:
    successes = [_sample_successes(outcome, k, rng) for outcome in (before, after)]
    values = [estimate(k, n_successes, k) for n_successes in successes]
    return Pair(
        env_key=before.env_key,
        before=estimate(before.attempts, before.successes, k),
        after=estimate(after.attempts, after.successes, k),
        attempts=1,  # k attempts are one observation: all pass, or one does, or not
        tested=values[1] - values[0],
        uneven=before.attempts != after.attempts,
    )


def correct_p_values(changes: Mapping[str, Change]) -> dict[str, Change]:
    """The same changes with p-values corrected for multiple tests (Holm)."""
    p_values = holm([change.p_value for change in changes.values()])
    return {
        env_key: replace(change, corrected_p_value=p_value)
        for (env_key, change), p_value in zip(changes.items(), p_values, strict=True)
    }


def describe_left_out(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """One sentence per reason for which tasks are not in a comparison."""
    changed = sum(comparison.overall.n_changed for comparison in comparisons)
    left_out = sum(comparison.overall.n_left_out for comparison in comparisons)
    if ungraded := left_out - changed:
        yield f"Tasks left out because they are not graded both before and after: {ungraded}."
    if changed:
        yield f"Tasks left out because their content differs before and after: {changed}."


def _change(pairs: Sequence[Pair], n_left_out: int, n_changed: int) -> Change:
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
        n_changed=n_changed,
    )
