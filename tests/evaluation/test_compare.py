"""A comparison calls a change what the evidence allows, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.trajectories.making import group

from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import Pair, Verdict, compare, difference_and_p
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import TaskOutcome
from skyfleet.evaluation.table import comparison_table

Rewards = Sequence[Sequence[float | None]]


def report(step: int = 0, **rewards_by_env: Rewards) -> EvalReport:
    """Each environment's tasks, each with its attempts' rewards."""
    groups = [
        group(rewards, task_key=f"{env_key}{i}", env_key=env_key)
        for env_key, tasks in rewards_by_env.items()
        for i, rewards in enumerate(tasks)
    ]
    return EvalReport.from_groups("eval", groups, step=step)


def arms(*, kept: int, gained: int, lost: int, failed: int) -> tuple[Rewards, Rewards]:
    """Single attempts at tasks that pass in both arms, in the later, in the earlier, in none."""
    before = [[1.0]] * kept + [[0.0]] * gained + [[1.0]] * lost + [[0.0]] * failed
    after = [[1.0]] * kept + [[1.0]] * gained + [[0.0]] * lost + [[0.0]] * failed
    return before, after


def test_the_largest_published_gain_is_underpowered() -> None:
    """github 14/30 -> 21/30, as if the two runs were unrelated: 11 gained, 4 lost."""
    before, after = arms(kept=10, gained=11, lost=4, failed=5)
    change = compare(report(github=before), report(80, github=after)).by_env["github"]
    assert (change.before, change.after) == pytest.approx((14 / 30, 21 / 30))
    assert change.difference == pytest.approx(7 / 30)
    assert change.p_value == pytest.approx(2 * 1941 / 2**15)
    assert change.interval[0] < 0 < change.interval[1]
    assert change.verdict is Verdict.UNDERPOWERED
    assert change.tasks_needed == 70


def test_a_gain_of_seven_tasks_without_a_loss_is_an_improvement() -> None:
    before, after = arms(kept=14, gained=7, lost=0, failed=9)
    change = compare(report(github=before), report(github=after)).overall
    assert change.p_value == pytest.approx(2 / 2**7)
    assert change.interval[0] > 0
    assert change.verdict is Verdict.IMPROVED


def test_a_loss_of_seven_tasks_is_a_regression() -> None:
    before, after = arms(kept=14, gained=0, lost=7, failed=9)
    assert compare(report(a=before), report(a=after)).overall.verdict is Verdict.REGRESSED


def test_28_attempts_at_one_task_are_one_observation() -> None:
    """The published ticketmaster row: one unique task, 1/28 -> 2/28."""
    before = [[1.0] + [0.0] * 27]
    after = [[1.0] * 2 + [0.0] * 26]
    change = compare(report(ticketmaster=before), report(ticketmaster=after)).overall
    assert (change.n_tasks, change.p_value) == (1, 1.0)
    assert change.detectable == float("inf")
    assert change.verdict is Verdict.UNDERPOWERED


@pytest.mark.parametrize(
    ("kept", "failed", "verdict"),
    [(19, 1, Verdict.SATURATED), (1, 19, Verdict.FAILING), (18, 2, Verdict.UNDERPOWERED)],
)
def test_rates_near_0_and_1_are_failing_and_saturated(
    kept: int, failed: int, verdict: Verdict
) -> None:
    before, after = arms(kept=kept, gained=0, lost=0, failed=failed)
    assert compare(report(a=before), report(a=after)).overall.verdict is verdict


def test_enough_tasks_without_a_change_give_no_evidence() -> None:
    before, after = arms(kept=200, gained=12, lost=10, failed=78)
    change = compare(report(a=before), report(a=after)).overall
    assert change.detectable < 0.10
    assert change.verdict is Verdict.NO_EVIDENCE


def test_p_values_are_corrected_over_the_environments() -> None:
    """7 gained and none lost is p = 1/64 alone, and 4/64 among four environments."""
    before, after = arms(kept=14, gained=7, lost=0, failed=9)
    same, _ = arms(kept=14, gained=0, lost=0, failed=9)
    comparison = compare(
        report(a=before, b=same, c=same, d=same), report(a=after, b=same, c=same, d=same)
    )
    assert comparison.by_env["a"].p_value == pytest.approx(1 / 64)
    assert comparison.by_env["a"].corrected_p_value == pytest.approx(4 / 64)
    assert comparison.by_env["a"].verdict is not Verdict.IMPROVED
    assert comparison.overall.corrected_p_value == comparison.overall.p_value
    assert comparison.overall.verdict is Verdict.IMPROVED


def test_tasks_not_graded_in_both_reports_are_left_out_and_counted() -> None:
    before = report(a=[[1.0], [0.0], [None], [0.0]], b=[[None]])
    after = report(a=[[1.0], [1.0], [1.0], [None], [1.0]], b=[[1.0]])
    comparison = compare(before, after)
    assert list(comparison.by_env) == ["a"]
    change = comparison.by_env["a"]
    assert (change.n_tasks, change.n_left_out) == (2, 3)
    assert (change.before, change.after) == (0.5, 1.0)
    assert (comparison.overall.n_tasks, comparison.overall.n_left_out) == (2, 4)


def with_contents(given: EvalReport, *hashes: str | None) -> EvalReport:
    outcomes = {
        key: replace(outcome, content_hash=content_hash)
        for (key, outcome), content_hash in zip(given.outcomes.items(), hashes, strict=True)
    }
    return replace(given, outcomes=outcomes)


def test_tasks_that_were_edited_between_the_reports_are_left_out_and_counted() -> None:
    before = with_contents(report(a=[[0.0]] * 4), "1", "2", None, "4")
    after = with_contents(report(a=[[1.0]] * 4), "1", "changed", "3", "changed")
    change = compare(before, after).overall
    assert (change.n_tasks, change.n_left_out, change.n_changed) == (2, 2, 2)
    assert "content differs before and after: 2." in comparison_table([compare(before, after)])
    with pytest.raises(TaskError, match="all 4 with the same key have another content"):
        compare(with_contents(before, *"1234"), with_contents(after, *"abcd"))


def test_thirds_that_cancel_give_a_difference_of_zero() -> None:
    before = [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    after = [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    change = compare(report(a=before), report(a=after)).overall
    assert (change.difference, change.p_value, change.tasks_needed) == (0.0, 1.0, None)


def test_equal_gains_on_all_tasks_are_an_improvement() -> None:
    before, after = [[0.0] * 10] * 12, [[1.0] + [0.0] * 9] * 12
    change = compare(report(a=before), report(a=after)).overall
    assert change.p_value == pytest.approx(2 / 2**12)
    assert change.verdict is Verdict.IMPROVED


def test_reports_without_a_common_task_raise() -> None:
    with pytest.raises(TaskError, match="'eval' at step 0 and 'eval' at step 5 have no task"):
        compare(report(a=[[1.0]]), report(5, b=[[1.0]]))


def test_reports_with_different_thresholds_raise() -> None:
    one = report(a=[[1.0]])
    with pytest.raises(TaskError, match="has pass threshold 1 and 'eval' at step 0 has"):
        compare(one, replace(one, pass_threshold=0.5))


def test_uneven_attempts_count_in_the_rates_and_are_sampled_down_for_the_test() -> None:
    """Once before, eight times after, at a rate of 0.95: a failed attempt must not weigh more."""
    before, after = [[1.0]] * 20, [[1.0] * 8] * 12 + [[1.0] * 7 + [0.0]] * 8
    change = compare(report(a=before), report(5, a=after)).overall
    assert (change.before, change.after) == pytest.approx((1.0, 0.95))
    assert (change.attempts, change.n_uneven) == (1, 20)
    assert change.p_value > 0.05
    assert compare(report(a=before), report(5, a=after)).overall == change
    assert compare(report(a=before), report(a=before)).overall.n_uneven == 0


def test_unknown_grades_only_affect_the_attempts_of_their_own_task() -> None:
    before = report(a=[[1.0, 0.0, None], [0.0, 0.0, 0.0]])
    change = compare(before, report(5, a=[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])).overall
    assert (change.n_uneven, change.attempts) == (1, 3)
    assert change.difference == pytest.approx(0.75)


def test_sampled_attempts_of_the_opposite_sign_are_not_significant() -> None:
    pairs = [Pair(env_key="a", before=0.5, after=0.6, attempts=1, tested=-1.0, uneven=True)] * 10
    assert difference_and_p(pairs) == pytest.approx((0.1, 1.0))


def test_rollouts_needed_are_tasks_times_attempts() -> None:
    before, after = [[0.0, 0.0]] * 12, [[1.0, 0.0]] * 6 + [[0.0, 0.0]] * 6
    change = compare(report(a=before), report(a=after)).overall
    assert change.tasks_needed is not None
    assert change.rollouts_needed == 2 * change.tasks_needed


def test_an_unchanged_policy_rarely_gets_a_significant_verdict() -> None:
    """Three environments of 20 tasks: a false verdict on any of them in at most 6 of 100."""
    rng = np.random.default_rng(8)
    trials, alarms = 400, 0
    for _ in range(trials):
        hardness = rng.beta(1, 1, (3, 20))
        before, after = (sampled_report(rng.binomial(3, hardness).tolist()) for _ in range(2))
        verdicts = {change.verdict for change in compare(before, after).by_env.values()}
        alarms += bool(verdicts & {Verdict.IMPROVED, Verdict.REGRESSED})
    assert 0 < alarms / trials <= 0.06


def sampled_report(successes: list[list[int]]) -> EvalReport:
    """Three attempts per task; only the outcomes, because scores are slow and not compared."""
    outcomes = {
        f"{env}/{task}": TaskOutcome(
            env_key=str(env), successes=c, rewards=(1.0,) * c + (0.0,) * (3 - c)
        )
        for env, tasks in enumerate(successes)
        for task, c in enumerate(tasks)
    }
    return replace(EvalReport.from_groups("eval", [], step=0), outcomes=outcomes)
