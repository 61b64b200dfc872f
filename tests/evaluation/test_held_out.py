"""One verdict for all held-out environments, and pass^k beside pass@k in a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from tests.trajectories.making import group

from skyfleet.evaluation.compare import Verdict, compare
from skyfleet.evaluation.held_out import compare_held_out
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.table import comparison_table, evidence_table

TRAINED = frozenset(["telecom"])


def report(
    name: str,
    step: int,
    rewards: Mapping[str, Sequence[float]],
    trained: frozenset[str] | None = TRAINED,
) -> EvalReport:
    """Single attempts at each environment's tasks."""
    groups = [
        group([reward], task_key=f"{env}{i}", env_key=env)
        for env, values in rewards.items()
        for i, reward in enumerate(values)
    ]
    return EvalReport.from_groups(name, groups, step=step, trained_envs=trained)


def sides(
    **before_and_after: tuple[list[float], list[float]],
) -> list[tuple[EvalReport, EvalReport]]:
    """One set per environment."""
    return [
        (report(env, 0, {env: before}), report(env, 9, {env: after}))
        for env, (before, after) in before_and_after.items()
    ]


def test_gains_that_are_too_few_in_each_held_out_domain_are_enough_together() -> None:
    """4 of 10 tasks gained in each, p = 2/2^4; 8 of 20 in both, p = 2/2^8."""
    gained = ([0.0] * 10, [1.0] * 4 + [0.0] * 6)
    pairs = sides(retail=gained, airline=gained)
    assert [compare(*pair).overall.p_value for pair in pairs] == [0.125, 0.125]
    held_out = compare_held_out(pairs)
    assert held_out is not None
    assert held_out.overall.p_value == pytest.approx(2 / 2**8)
    assert (held_out.overall.n_tasks, held_out.overall.verdict) == (20, Verdict.IMPROVED)
    assert list(held_out.by_env) == ["airline", "retail"]
    assert "| held out | all" in comparison_table([held_out])


def test_trained_domains_are_not_in_the_held_out_verdict() -> None:
    pairs = sides(
        telecom=([0.0] * 9, [1.0] * 9), retail=([0.0] * 3, [0.0] * 3), airline=([0.0], [0.0])
    )
    held_out = compare_held_out(pairs)
    assert held_out is not None
    assert (held_out.overall.n_tasks, held_out.overall.difference) == (4, 0.0)


def test_a_set_that_is_all_of_the_held_out_tasks_needs_no_second_row() -> None:
    assert compare_held_out(sides(telecom=([0.0], [1.0]), retail=([0.0], [1.0]))) is None
    unknown = report("retail", 0, {"retail": [0.0]}, trained=None)
    assert compare_held_out([(unknown, unknown), *sides(airline=([0.0], [1.0]))]) is None


def test_a_task_in_two_sets_counts_once() -> None:
    retail, airline = sides(retail=([0.0] * 4, [1.0] * 4), airline=([0.0] * 3, [0.0] * 3))
    held_out = compare_held_out([retail, retail, airline])
    assert held_out is not None
    assert held_out.overall.n_tasks == 7


def attempts(step: int, *successes: int) -> EvalReport:
    """Tasks with so many successes in four attempts each."""
    groups = [
        group([1.0] * n + [0.0] * (4 - n), task_key=f"t{i}", env_key="retail")
        for i, n in enumerate(successes)
    ]
    return EvalReport.from_groups("retail", groups, step=step)


def test_pass_hat_k_and_pass_at_k_have_their_own_verdicts() -> None:
    """All ten tasks go from 3 of 4 to 4 of 4: pass@4 stays 1, pass^4 rises from 0 to 1."""
    comparison = compare(attempts(0, *[3] * 10), attempts(9, *[4] * 10))
    at_k, hat_k = comparison.by_k["pass@4"], comparison.by_k["pass^4"]
    assert (at_k.before, at_k.after, at_k.verdict) == (1.0, 1.0, Verdict.SATURATED)
    assert (hat_k.before, hat_k.after, hat_k.verdict) == (0.0, 1.0, Verdict.IMPROVED)
    assert hat_k.corrected_p_value == pytest.approx(2 * 2 / 2**10)  # Holm over the two
    for table in (comparison_table([comparison]), evidence_table([comparison])):
        (row,) = [line for line in table.splitlines() if "pass^4" in line]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[:6] == ["retail", "pass^4", "10", "0.0 %", "100.0 %", "+100.0"]
        assert cells[-1] == "IMPROVED"


def test_single_attempts_have_no_pass_hat_k() -> None:
    before, after = sides(retail=([0.0], [1.0]))[0]
    assert compare(before, after).by_k == {}


def test_k_is_the_number_of_attempts_that_a_task_has_on_both_sides() -> None:
    """One of two tasks has four attempts in both reports, the other only before."""
    before = attempts(0, 4, 4)
    groups = [
        group([1.0] * 4, task_key="t0", env_key="retail"),
        group([1.0, 0.0], task_key="t1", env_key="retail"),
    ]
    after = EvalReport.from_groups("retail", groups, step=9)
    assert compare(before, after).by_k["pass^4"].n_tasks == 1


def test_a_report_keeps_the_environments_that_were_trained_on() -> None:
    saved = report("retail", 3, {"retail": [1.0]})
    assert EvalReport.from_json(saved.to_json()).trained_envs == ("telecom",)
