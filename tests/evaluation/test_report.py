"""An evaluation report weights every task equally and has an interval for every rate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.trajectories.making import attempt, group, played

from skyfleet.errors import ConfigError
from skyfleet.evaluation.agent_info import AgentInfo, differences
from skyfleet.evaluation.baselines import Baseline
from skyfleet.evaluation.report import EvalReport, MatchedReports, match_reports, metric_prefix
from skyfleet.evaluation.score import EnvScore, TaskOutcome
from skyfleet.metrics.intervals import mean_rate, wilson
from skyfleet.tasks.task import Task
from skyfleet.trajectories.records import RecordError

SINGLE = EvalReport.from_groups(
    "eval", [group([float(i < 14)], task_key=f"t{i:02d}") for i in range(30)], step=0
)
MIXED = EvalReport.from_groups(
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


def test_the_interval_of_repeated_attempts_treats_tasks_as_the_unit() -> None:
    assert MIXED.by_env["github"].interval == mean_rate([0.5, 0.0, 1.0])
    assert MANY.overall.interval == mean_rate([0.5, 1.0, 0.0, 1.0, 0.0])


def test_a_task_has_the_same_weight_for_any_number_of_graded_attempts() -> None:
    score = MIXED.by_env["github"]
    assert (score.n_tasks, score.n_attempts, score.n_unknown) == (3, 9, 3)
    assert score.success_rate == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert score.mean_reward == pytest.approx((0.5 + 0.125 + 1.0) / 3)


def test_pass_at_k_is_over_tasks_with_k_graded_attempts() -> None:
    """Five of the six pairs of a have a success and one has two; c has one graded attempt."""
    score = MIXED.by_env["github"]
    assert score.pass_at_k == pytest.approx({1: 0.5, 2: (5 / 6 + 0) / 2, 4: 0.5})
    assert score.pass_hat_k == pytest.approx({1: 0.5, 2: (1 / 6 + 0) / 2, 4: 0.0})


def test_an_ungraded_environment_has_no_rate() -> None:
    score = MIXED.by_env["mail/box"]
    assert (score.n_tasks, score.n_unknown, score.success_rate) == (0, 4, None)
    assert score.interval == (0.0, 1.0)
    assert MIXED.metrics()["eval/mail_box/unknown_grades"] == 4.0
    assert [key for key in MIXED.metrics() if "mail_box" in key] == ["eval/mail_box/unknown_grades"]


def test_groups_with_the_same_task_key_are_one_task() -> None:
    twice = EvalReport.from_groups("eval", [group([1.0]), group([0.0, None])], step=0)
    assert twice.outcomes == {
        "t": TaskOutcome(env_key="github", successes=1, rewards=(1.0, 0.0), unknown=1)
    }


def test_the_main_set_has_skyrls_metric_names() -> None:
    metrics = MIXED.metrics(metric_prefix("held out", is_main=True))
    github = {k.split("/")[2]: v for k, v in metrics.items() if k.startswith("eval/github/")}
    assert set(github) == {
        "avg_score", "pass_at_1", "pass_at_1_low", "pass_at_1_high", "pass_at_2", "pass_at_4",
        "pass_hat_2", "pass_hat_4", "mean_positive_reward", "variance_per_prompt", "signal_ratio",
        "unknown_grades",
    }  # fmt: skip
    assert github["mean_positive_reward"] == pytest.approx((1 + 1 + 0.5 + 1) / 9)
    assert github["variance_per_prompt"] == pytest.approx((0.25 + 0.046875) / 2)
    overall = {k.split("/")[2]: v for k, v in metrics.items() if k.startswith("eval/all/")}
    assert overall.keys() == github.keys()
    assert overall["avg_score"] == github["avg_score"] == MIXED.overall.mean_reward
    assert overall["unknown_grades"] == 7.0


def test_a_named_set_has_the_overall_numbers_at_the_top_level() -> None:
    metrics = MIXED.metrics(metric_prefix("held out", is_main=False))
    overall = {k.split("/")[1]: v for k, v in metrics.items() if k.count("/") == 1}
    assert overall.keys() == {
        "average_reward", "success_rate", "success_rate_low", "success_rate_high", "pass_at_2",
        "pass_at_4", "pass_hat_2", "pass_hat_4", "mean_positive_reward", "variance_per_prompt",
        "signal_ratio", "unknown_grades",
    }  # fmt: skip
    assert overall["average_reward"] == MIXED.overall.mean_reward
    assert overall["success_rate"] == MIXED.overall.success_rate
    assert (overall["success_rate_low"], overall["success_rate_high"]) == MIXED.overall.interval
    assert metrics["test-held out/github/avg_score"] == MIXED.by_env["github"].mean_reward
    assert not [key for key in metrics if "/all/" in key]


def test_the_prefix_is_that_of_the_seeds() -> None:
    assert metric_prefix("unseen_tasks", is_main=True) == "eval"
    assert metric_prefix("retail_val", is_main=False) == "eval-retail"
    assert metric_prefix("airline", is_main=False) == "test-airline"


def test_a_report_without_groups_is_empty() -> None:
    empty = EvalReport.from_groups("eval", [], step=0)
    assert (empty.overall.n_tasks, empty.overall.success_rate, dict(empty.by_env)) == (0, None, {})
    assert empty.metrics() == {"eval/all/unknown_grades": 0.0}


BASED = EvalReport.from_groups(
    "based",
    [group([1.0])],
    step=3,
    baselines={"github": Baseline(null_rate=0.5, oracle_rate=None, vacuous=("t",), impossible=())},
    pass_threshold=0.5,
    agent_info=AgentInfo(model="tiny", checkpoint="runs/a", temperature=0.5, max_turns=8),
)


@pytest.mark.parametrize(
    "report", [SINGLE, MIXED, EvalReport.from_groups("none", [], step=3), BASED]
)
def test_a_report_survives_a_round_trip_through_json(report: EvalReport) -> None:
    assert EvalReport.from_json(report.to_json()) == report


def test_the_agent_keeps_its_key_on_disk() -> None:
    assert '"played_by": {' in BASED.to_json()


def test_an_invalid_report_names_the_field() -> None:
    with pytest.raises(RecordError, match=r"step: .*; pass a report that `to_json` wrote"):
        EvalReport.from_json(SINGLE.to_json().replace('"step": 0', '"step": "soon"'))


MANY = EvalReport.from_groups(
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
    """The mean over the parts, weighted by tasks."""
    weighted = [(p.n_tasks, float(getattr(p, number))) for p in parts.values() if p.n_tasks]
    return sum(n * value for n, value in weighted) / sum(n for n, _ in weighted)


@pytest.mark.parametrize("parts", [MANY.by_env, MANY.by_difficulty, MANY.by_exposure])
def test_every_grouping_combines_to_the_overall_score(parts: Mapping[str, EnvScore]) -> None:
    assert len(parts) > 1
    for number in ("success_rate", "mean_reward"):
        assert recombined(parts, number) == pytest.approx(getattr(MANY.overall, number))
    for number in ("n_tasks", "n_attempts", "n_unknown"):
        assert sum(getattr(p, number) for p in parts.values()) == getattr(MANY.overall, number)


def test_pass_at_k_leaves_out_tasks_with_fewer_graded_attempts() -> None:
    """b has one graded attempt, so only one of the two tasks of github is in its pass@2."""
    assert MANY.by_env["github"].n_tasks == 2
    assert MANY.overall.pass_at_k[2] == pytest.approx((1 + 0 + 1 + 0) / 4)


def test_the_differences_between_two_agents_are_named() -> None:
    one = AgentInfo(model="tiny", temperature=0.0, max_turns=8)
    other = AgentInfo(model="tiny", checkpoint="runs/a", temperature=1.0, max_turns=8)
    assert differences(one, one) == []
    assert differences(one, other) == [
        "checkpoint: none before, runs/a after",
        "temperature: 0 before, 1 after",
    ]


def test_trained_and_held_out_environments_are_scored_separately() -> None:
    assert list(MANY.by_exposure) == ["held out", "trained"]
    assert MANY.by_exposure["held out"] == MANY.by_env["mail"]
    assert MANY.by_exposure["trained"].success_rate == pytest.approx((0.5 + 1 + 0) / 3)
    assert SINGLE.by_exposure == {}


def test_difficulties_are_scored_separately_if_tasks_state_them() -> None:
    assert list(MANY.by_difficulty) == ["1 easy", "2 medium", "3 hard", "7", "unstated"]
    assert MANY.by_difficulty["2 medium"].success_rate == 1.0
    assert MANY.by_difficulty["3 hard"].n_unknown == 2
    assert SINGLE.by_difficulty == {}


def test_a_lower_threshold_counts_partial_rewards_as_passes() -> None:
    groups = [group([0.6, 0.4])]
    assert EvalReport.from_groups("eval", groups, step=0).overall.success_rate == 0.0
    assert (
        EvalReport.from_groups("eval", groups, step=0, pass_threshold=0.5).overall.success_rate
        == 0.5
    )


def test_at_the_default_threshold_the_verifiers_success_decides() -> None:
    groups = played(attempt(0.7, success=True))
    assert EvalReport.from_groups("eval", groups, step=0).overall.success_rate == 1.0
    assert (
        EvalReport.from_groups("eval", groups, step=0, pass_threshold=0.8).overall.success_rate
        == 0.0
    )


def test_a_report_of_an_older_version_loads() -> None:
    fields = json.loads(SINGLE.to_json())
    for added in ("by_difficulty", "by_exposure", "baselines", "pass_threshold", "played_by"):
        del fields[added]
    assert EvalReport.from_json(json.dumps(fields)) == SINGLE


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (0, 20, 100):
        for name in ("near", "far"):
            write(tmp_path / "run" / "reports" / f"step_{step:06d}", name, step)
    return tmp_path / "run"


def write(folder: Path, name: str, step: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(EvalReport.from_groups(name, [group([1.0])], step=step).to_json())
    return path


def steps(matched: MatchedReports) -> list[tuple[str, int, int]]:
    return [(before.name, before.step, after.step) for before, after in matched.pairs]


def test_a_single_run_compares_its_first_step_with_its_last(run: Path) -> None:
    assert steps(match_reports(run, None)) == [("far", 0, 100), ("near", 0, 100)]
    assert steps(match_reports(run, None, step=20)) == [("far", 0, 20), ("near", 0, 20)]


def test_two_runs_compare_their_last_steps(run: Path, tmp_path: Path) -> None:
    write(tmp_path / "other" / "reports" / "step_000020", "near", 20)
    matched = match_reports(run, tmp_path / "other")
    assert steps(matched) == [("near", 100, 20)]
    assert matched.unmatched == ("far",)
    assert steps(match_reports(run, tmp_path / "other", step=20)) == [("near", 20, 20)]


def test_folders_and_files_of_reports_are_found(run: Path) -> None:
    first = run / "reports" / "step_000000"
    assert steps(match_reports(first, run)) == [("far", 0, 100), ("near", 0, 100)]
    assert steps(match_reports(first / "near.json", run)) == [("near", 0, 100)]
    # Two files are compared whatever their sets are called.
    assert steps(match_reports(first / "near.json", first / "far.json")) == [("near", 0, 0)]


@pytest.mark.parametrize(
    ("before", "after", "step", "sentence"),
    [
        ("run/reports/step_000000", "lone", 7, "step 7 needs a run folder, and neither"),
        ("run", None, 7, r"--step 7: .*run was evaluated at \[0, 20, 100\]"),
        ("run/reports/step_000000", None, None, "has reports of 0 steps, and a comparison needs"),
        ("run", "run/reports", None, "holds no report"),
        ("run/reports/step_000000/near.json", "lone", None, "no set in common"),
        ("bad.json", "run", None, "bad.json is not a report: "),
    ],
)
def test_a_path_without_reports_raises(
    run: Path, tmp_path: Path, before: str, after: str | None, step: int | None, sentence: str
) -> None:
    write(tmp_path / "lone", "alone", 0)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=sentence):
        match_reports(tmp_path / before, tmp_path / after if after else None, step=step)
