"""An evaluation report counts tasks once, and says how sure it is."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from tests.trajectories.making import attempt, group, played

from skyfleet.evaluation.agent_info import AgentInfo, differences
from skyfleet.evaluation.baselines import Baseline
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import EnvScore, TaskOutcome
from skyfleet.metrics.intervals import mean_rate, wilson
from skyfleet.tasks.task import Task
from skyfleet.trajectories.records import RecordError

SINGLE = EvalReport.of(
    "eval", [group([float(i < 14)], task_key=f"t{i:02d}") for i in range(30)], step=0
)
MIXED = EvalReport.of(
    "held out",
    [
        group([1.0, 1.0, 0.0, 0.0], task_key="a"),
        group([0.5, 0.0, 0.0, 0.0], task_key="b"),
        group([1.0, None, None, None], task_key="c"),
        group([None] * 4, task_key="d", env_key="mail/box"),
    ],
    step=80,
)


def test_single_attempts_have_wilsons_interval() -> None:
    score = SINGLE.overall
    assert (score.n_tasks, score.n_attempts, score.n_unknown) == (30, 30, 0)
    assert score.success_rate == pytest.approx(14 / 30)
    assert score.interval == wilson(14 / 30, 30)
    assert score.pass_at_k == {1: pytest.approx(14 / 30)}


def test_the_interval_of_repeated_attempts_is_over_tasks() -> None:
    assert MIXED.by_env["github"].interval == mean_rate([0.5, 0.0, 1.0])
    assert MANY.overall.interval == mean_rate([0.5, 1.0, 0.0, 1.0, 0.0])


def test_a_task_counts_once_however_often_it_was_graded() -> None:
    score = MIXED.by_env["github"]
    assert (score.n_tasks, score.n_attempts, score.n_unknown) == (3, 9, 3)
    assert score.success_rate == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert score.mean_reward == pytest.approx((0.5 + 0.125 + 1.0) / 3)


def test_pass_at_k_is_over_tasks_with_k_graded_attempts() -> None:
    """Of a's six pairs five hold a success and one holds two; c has one graded attempt."""
    score = MIXED.by_env["github"]
    assert score.pass_at_k == pytest.approx({1: 0.5, 2: (5 / 6 + 0) / 2, 4: 0.5})
    assert score.pass_hat_k == pytest.approx({1: 0.5, 2: (1 / 6 + 0) / 2, 4: 0.0})


def test_an_environment_nobody_could_grade_has_no_rate() -> None:
    score = MIXED.by_env["mail/box"]
    assert (score.n_tasks, score.n_unknown, score.success_rate) == (0, 4, None)
    assert score.interval == (0.0, 1.0)
    assert MIXED.metrics()["eval/mail_box/unknown_grades"] == 4.0
    assert [key for key in MIXED.metrics() if "mail_box" in key] == ["eval/mail_box/unknown_grades"]


def test_groups_of_one_task_are_one_task() -> None:
    twice = EvalReport.of("eval", [group([1.0]), group([0.0, None])], step=0)
    assert twice.outcomes == {
        "t": TaskOutcome(env_key="github", successes=1, rewards=(1.0, 0.0), unknown=1)
    }


def test_metrics_are_named_by_environment_and_set() -> None:
    metrics = MIXED.metrics("test-held out")
    github = {
        k.split("/")[2]: v for k, v in metrics.items() if k.startswith("test-held out/github")
    }
    assert set(github) == {
        "avg_score", "pass_at_1", "pass_at_1_low", "pass_at_1_high", "pass_at_2", "pass_at_4",
        "pass_hat_2", "pass_hat_4", "mean_positive_reward", "variance_per_prompt", "signal_ratio",
        "unknown_grades",
    }  # fmt: skip
    assert github["mean_positive_reward"] == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    assert github["variance_per_prompt"] == pytest.approx((0.25 + 0.046875) / 2)
    assert metrics["test-held out/all/pass_at_1"] == github["pass_at_1"]
    assert metrics["test-held out/all/unknown_grades"] == 7.0


def test_no_groups_are_a_report_of_nothing() -> None:
    empty = EvalReport.of("eval", [], step=0)
    assert (empty.overall.n_tasks, empty.overall.success_rate, dict(empty.by_env)) == (0, None, {})
    assert empty.metrics() == {"eval/all/unknown_grades": 0.0}


BASED = EvalReport.of(
    "based",
    [group([1.0])],
    step=3,
    baselines={"github": Baseline(null_rate=0.5, oracle_rate=None, vacuous=("t",), impossible=())},
    pass_threshold=0.5,
    played_by=AgentInfo(model="tiny", checkpoint="runs/a", temperature=0.5, max_turns=8),
)


@pytest.mark.parametrize("report", [SINGLE, MIXED, EvalReport.of("none", [], step=3), BASED])
def test_a_report_returns_from_json_as_it_was(report: EvalReport) -> None:
    assert EvalReport.from_json(report.to_json()) == report


def test_a_broken_report_says_where() -> None:
    with pytest.raises(RecordError, match=r"step: .*; give what to_json wrote"):
        EvalReport.from_json(SINGLE.to_json().replace('"step": 0', '"step": "soon"'))


MANY = EvalReport.of(
    "eval",
    [
        group([1.0, 0.0], task_key="a"),
        group([1.0, None], task_key="b"),
        group([0.0, 0.0], task_key="c", env_key="mail"),
        group([1.0, 1.0], task_key="d", env_key="mail"),
        group([None, None], task_key="e", env_key="mail"),
        group([0.6, 0.4], task_key="f", env_key="shop"),
    ],
    step=0,
    tasks=[
        Task(key=key, env_key="-", prompt="p", difficulty=difficulty)
        for key, difficulty in zip("abcdef", (1, 2, None, 2, 3, 7), strict=True)
    ],
    trained_envs={"github", "shop"},
)


def recombined(parts: Mapping[str, EnvScore], number: str) -> float:
    """Weighted by tasks."""
    weighed = [(p.n_tasks, float(getattr(p, number))) for p in parts.values() if p.n_tasks]
    return sum(n * value for n, value in weighed) / sum(n for n, _ in weighed)


@pytest.mark.parametrize("parts", [MANY.by_env, MANY.by_difficulty, MANY.by_exposure])
def test_every_grouping_recombines_to_the_whole(parts: Mapping[str, EnvScore]) -> None:
    assert len(parts) > 1
    for number in ("success_rate", "mean_reward"):
        assert recombined(parts, number) == pytest.approx(getattr(MANY.overall, number))
    for number in ("n_tasks", "n_attempts", "n_unknown"):
        assert sum(getattr(p, number) for p in parts.values()) == getattr(MANY.overall, number)


def test_pass_at_k_is_over_other_tasks_than_pass_at_1_where_grades_are_unknown() -> None:
    """b has one graded attempt: of github's two tasks, one is in its pass@2."""
    assert MANY.by_env["github"].n_tasks == 2
    assert MANY.overall.pass_at_k[2] == pytest.approx((1 + 0 + 1 + 0) / 4)


def test_what_differs_between_two_players_is_named() -> None:
    one = AgentInfo(model="tiny", temperature=0.0, max_turns=8)
    other = AgentInfo(model="tiny", checkpoint="runs/a", temperature=1.0, max_turns=8)
    assert differences(one, one) == []
    assert differences(one, other) == [
        "checkpoint: none before, runs/a after",
        "temperature: 0 before, 1 after",
    ]


def test_trained_and_held_out_environments_are_apart() -> None:
    assert list(MANY.by_exposure) == ["held out", "trained"]
    assert MANY.by_exposure["held out"] == MANY.by_env["mail"]
    assert MANY.by_exposure["trained"].success_rate == pytest.approx((0.5 + 1 + 0) / 3)
    assert SINGLE.by_exposure == {}


def test_difficulties_are_apart_where_a_task_says_its_own() -> None:
    assert list(MANY.by_difficulty) == ["1 easy", "2 medium", "3 hard", "7", "unstated"]
    assert MANY.by_difficulty["2 medium"].success_rate == 1.0
    assert MANY.by_difficulty["3 hard"].n_unknown == 2
    assert SINGLE.by_difficulty == {}


def test_a_lower_threshold_lets_partial_rewards_pass() -> None:
    groups = [group([0.6, 0.4])]
    assert EvalReport.of("eval", groups, step=0).overall.success_rate == 0.0
    assert EvalReport.of("eval", groups, step=0, pass_threshold=0.5).overall.success_rate == 0.5


def test_at_the_default_threshold_the_environments_word_counts() -> None:
    said = played(attempt(0.7, success=True))
    assert EvalReport.of("eval", said, step=0).overall.success_rate == 1.0
    assert EvalReport.of("eval", said, step=0, pass_threshold=0.8).overall.success_rate == 0.0


def test_a_report_of_an_older_version_is_read() -> None:
    fields = json.loads(SINGLE.to_json())
    for added in ("by_difficulty", "by_exposure", "baselines", "pass_threshold", "played_by"):
        del fields[added]
    assert EvalReport.from_json(json.dumps(fields)) == SINGLE
