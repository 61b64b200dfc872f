"""The first step is the best until a later one is significantly better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
from tests.trajectories.making import group

from skyfleet.errors import TaskError
from skyfleet.evaluation.model_selection import (
    ModelSelection,
    describe_best_step,
    select_best_step,
)
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import TaskOutcome

EMPTY = EvalReport.from_groups("eval", [], step=0)


def passing(step: int, n_passed: int, n_tasks: int = 40) -> EvalReport:
    groups = [group([float(i < n_passed)], task_key=f"t{i:02d}") for i in range(n_tasks)]
    return EvalReport.from_groups("eval", groups, step=step)


def sampled(step: int, successes: Sequence[int], attempts: int) -> EvalReport:
    outcomes = {
        str(task): TaskOutcome(
            env_key="a", successes=c, rewards=(1.0,) * c + (0.0,) * (attempts - c)
        )
        for task, c in enumerate(successes)
    }
    return replace(EMPTY, step=step, outcomes=outcomes)


def test_the_first_step_is_the_incumbent_until_a_later_one_is_better() -> None:
    """10 gained of 10 is p = 1/1024; the second comparison's share is 0.05 / 2.612 / 2 ** 1.5."""
    best = select_best_step([passing(0, 10), passing(5, 13), passing(10, 20), passing(15, 22)])
    assert best.step == 10
    assert [c.incumbent_step for c in best.candidates] == [0, 0, 10]
    assert best.candidates[0].p_value == pytest.approx(1 / 8)
    assert best.candidates[1].p_value == pytest.approx(1 / 1024)
    assert best.candidates[1].alpha == pytest.approx(0.05 / 2.612375 / 2**1.5)
    assert best.candidates[2].difference == pytest.approx(2 / 40)


def test_a_higher_rate_alone_does_not_replace_the_incumbent() -> None:
    assert select_best_step([passing(0, 10), passing(5, 13)]).step == 0


def test_a_worse_step_is_never_the_best() -> None:
    best = select_best_step([passing(0, 30), passing(5, 0), passing(10, 0)])
    assert best.step == 0
    assert all(c.p_value > 0.99 for c in best.candidates)


def test_later_evaluations_do_not_change_earlier_comparisons() -> None:
    reports = [passing(5 * i, rate) for i, rate in enumerate((10, 30, 12, 40, 39))]
    whole = select_best_step(reports)
    for n in range(1, len(reports) + 1):
        assert select_best_step(reports[:n]).candidates == whole.candidates[: n - 1]


def test_the_significance_levels_of_all_comparisons_add_up_to_at_most_five_percent() -> None:
    selection = select_best_step([passing(step, 1, n_tasks=2) for step in range(1000)])
    assert 0.045 < sum(c.alpha for c in selection.candidates) < 0.05


def test_a_report_without_grades_is_skipped() -> None:
    unknown = EvalReport.from_groups("eval", [group([None], task_key="t00")], step=5)
    assert select_best_step([unknown, passing(10, 10)]) == ModelSelection(step=10, candidates=())
    with pytest.raises(TaskError, match="none of 1 reports has a graded task"):
        select_best_step([unknown])


def test_a_report_without_a_task_in_common_with_the_incumbent_is_skipped() -> None:
    def graded(step: int, *, a: float | None, b: float | None) -> EvalReport:
        groups = [group([a], task_key="a"), group([b], task_key="b", env_key="mail")]
        return EvalReport.from_groups("eval", groups, step=step)

    best = select_best_step(
        [graded(0, a=1.0, b=None), graded(5, a=None, b=1.0), graded(10, a=0.0, b=1.0)]
    )
    assert (best.step, [c.step for c in best.candidates]) == (0, [10])
    assert best.candidates[0].alpha == pytest.approx(0.05 / 2.612375)  # of the first comparison


def test_forty_evaluations_of_500_tasks_are_compared_quickly() -> None:
    rng = np.random.default_rng(0)
    chances = rng.beta(1, 1, 500)
    reports = [sampled(step, rng.binomial(8, chances).tolist(), 8) for step in range(41)]
    began = perf_counter()
    select_best_step(reports)
    assert perf_counter() - began < 4  # it took eight seconds, and takes a tenth of one


@pytest.mark.parametrize(("n_tasks", "attempts"), [(40, 1), (24, 4)])
def test_a_run_that_never_improves_keeps_its_first_step(n_tasks: int, attempts: int) -> None:
    """20 evaluations of an unchanged policy; the luckiest one nearly always has a higher rate."""
    rng = np.random.default_rng(3)
    trials, replaced, lucky = 100, 0, 0
    for _ in range(trials):
        chances = rng.beta(1, 1, n_tasks)
        draws = [rng.binomial(attempts, chances).tolist() for _ in range(21)]
        replaced += (
            select_best_step([sampled(i, d, attempts) for i, d in enumerate(draws)]).step != 0
        )
        lucky += max(map(sum, draws)) > sum(draws[0])
    assert replaced / trials <= 0.05
    assert lucky / trials > 0.8


def test_a_run_that_improves_selects_a_later_step() -> None:
    rng = np.random.default_rng(4)
    found = 0
    for _ in range(40):
        chances = rng.beta(1, 1, 60)
        eased = [chances + 0.05 * min(i, 8) * (1 - chances) for i in range(13)]
        reports = [sampled(i, rng.binomial(4, e).tolist(), 4) for i, e in enumerate(eased)]
        found += select_best_step(reports).step >= 4
    assert found >= 32


def test_a_first_step_that_stays_the_best_says_why() -> None:
    assert describe_best_step("val", 60) == "Best step, by val: 60."
    says = "Best step, by val: 0 (no later step is significantly better)."
    assert describe_best_step("val", 0) == says
