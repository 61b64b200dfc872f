"""Settings trained with several seeds: paired by task and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import Verdict, compare
from skyfleet.evaluation.compare_seeds import compare_over_seeds, score_over_seeds
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import EnvScore, TaskOutcome


def report(passed: Mapping[str, Sequence[int]]) -> EvalReport:
    """By task, 1 or 0 per attempt; no attempt is an ungraded task."""
    outcomes = {
        key: TaskOutcome(
            env_key="e",
            successes=sum(attempts),
            rewards=tuple(map(float, attempts)),
            unknown=0 if attempts else 1,
        )
        for key, attempts in passed.items()
    }
    overall = EnvScore.from_outcomes(list(outcomes.values()))
    return EvalReport(name="val", step=3, overall=overall, by_env={}, outcomes=outcomes)


def pattern(n_passed: int, n_tasks: int = 100) -> EvalReport:
    return report({f"t{n:03d}": [int(n < n_passed)] for n in range(n_tasks)})


def test_one_seed_is_the_paired_comparison_over_tasks() -> None:
    before, after = pattern(20), pattern(40)
    found = compare_over_seeds({42: before}, {42: after})
    assert found.change == compare(before, after).overall
    assert found.change.verdict is Verdict.IMPROVED
    assert found.seeds == (42,)


def test_a_gain_of_every_seed_is_significant_and_the_luck_of_one_is_not() -> None:
    before = {1: pattern(20), 2: pattern(22), 3: pattern(21)}
    steady = compare_over_seeds(before, {1: pattern(40), 2: pattern(43), 3: pattern(41)})
    assert steady.change.difference == pytest.approx(61 / 300)
    assert steady.change.verdict is Verdict.IMPROVED
    assert steady.difference_by_seed == pytest.approx({1: 0.20, 2: 0.21, 3: 0.20})
    lucky = compare_over_seeds(before, {1: pattern(70), 2: pattern(20), 3: pattern(22)})
    assert lucky.change.difference > 0.15
    assert lucky.change.verdict is Verdict.UNDERPOWERED
    low, high = lucky.change.interval
    assert low < 0 < high


def test_only_tasks_and_seeds_that_both_sides_have_are_compared() -> None:
    before = {1: report({"a": [1], "b": [0], "c": [1]}), 2: report({"a": [0], "b": [0], "c": []})}
    after = {2: report({"a": [1], "b": [1], "c": [1]}), 3: pattern(5, 10)}
    found = compare_over_seeds(before, after)
    assert found.seeds == (2,)
    assert (found.change.n_tasks, found.change.n_left_out) == (2, 1)
    with pytest.raises(TaskError, match="no seed has finished on both sides"):
        compare_over_seeds({1: before[1]}, {2: after[2]})
    with pytest.raises(TaskError, match="has no task that is graded in every run"):
        compare_over_seeds({2: before[2]}, {2: report({"c": [1]})})


def test_the_score_of_a_setting_varies_with_tasks_and_seeds() -> None:
    alone = score_over_seeds({1: pattern(30)})
    assert (alone.rate, alone.interval) == (0.3, pattern(30).overall.interval)
    equal = score_over_seeds({1: pattern(30), 2: pattern(30), 3: pattern(30)})
    apart = score_over_seeds({1: pattern(10), 2: pattern(30), 3: pattern(50)})
    assert apart.rate == pytest.approx(0.3)
    assert apart.rate_by_seed == pytest.approx({1: 0.1, 2: 0.3, 3: 0.5})
    assert apart.interval[0] < equal.interval[0] < 0.3 < equal.interval[1] < apart.interval[1]
    assert apart.interval[0] >= 0


def test_tasks_that_differ_between_the_runs_are_left_out() -> None:
    def edited(given: EvalReport, key: str, content_hash: str) -> EvalReport:
        outcome = replace(given.outcomes[key], content_hash=content_hash)
        return replace(given, outcomes={**given.outcomes, key: outcome})

    before = {1: edited(pattern(20), "t000", "a"), 2: pattern(20)}
    after = {1: edited(pattern(40), "t000", "b"), 2: pattern(40)}
    change = compare_over_seeds(before, after).change
    assert (change.n_tasks, change.n_left_out) == (99, 1)
