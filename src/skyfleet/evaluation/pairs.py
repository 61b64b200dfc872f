"""Pairs: the tasks that two reports have in common, and whether they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from skyfleet.errors import TaskError
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import TaskOutcome
from skyfleet.metrics.significance import mcnemar_exact, sign_flip


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
