"""A run is compared with the plan in its folder: every quantity, with what differs and by how much."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.analysis.report_runs import add_rows, add_training, empty_run, rewarded

from skyfleet.analysis.html.page import build_report_page
from skyfleet.analysis.plan_comparison import compare_plan
from skyfleet.analysis.plan_text import format_plan
from skyfleet.analysis.run_folder import RunFolder, open_run
from skyfleet.analysis.run_plan import (
    PLAN,
    QUANTITIES,
    DetectableGain,
    Estimate,
    ExpectedSignal,
    MemoryPhase,
    Price,
    RunPlan,
    Usage,
    read_plan,
    write_plan,
    write_usage,
)
from skyfleet.config.keys import flatten
from skyfleet.errors import ConfigError
from skyfleet.trajectories.records import RecordError

PLANNED = dict.fromkeys(QUANTITIES, 10.0) | {"step": 12.0, "whole run": 3600.0}


def make_plan(run: RunFolder, **changes: object) -> RunPlan:
    plan = RunPlan(
        skyfleet_version="1",
        run_name="r",
        machine="NVIDIA H200",
        config=flatten(run.config),
        n_probe_steps=4,
        n_steps=2,
        n_warm_start_steps=3,
        n_episodes=8,
        n_evaluations=2,
        n_checkpoints=2,
        quantities={
            name: Estimate(value=value, low=value / 2, high=2 * value)
            for name, value in PLANNED.items()
        },
        memory=[MemoryPhase(name="rollouts", n_bytes=2**30, parts={"weights": 2**30})],
        signals={
            "shop": ExpectedSignal(
                n_groups=10, mixed_groups=Estimate(value=0.1, low=0.0, high=0.2), pass_rate=0.9
            )
        },
        detectable={"val": DetectableGain(n_tasks=50, attempts=2, low=0.061, high=None)},
        prices=[Price(cloud="vast", instance="1x_H200", dollars_per_hour=2.5)],
    )
    return plan.model_copy(update=changes)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Two steps of ten seconds and a first evaluation; everything else took four seconds."""
    made = empty_run(tmp_path / "run")
    timing = {"timing/step": 10.0, "timing/generate": 6.0, "timing/train_critic_and_policy": 4.0}
    rows = [
        {"step": 0, "timing/eval": 10.0},
        {"step": 1, **timing, "timing/save_checkpoints": 2.0},
        {"step": 2, **timing, "timing/eval": 8.0},
    ]
    add_rows(made, [{"step": n, "generate/avg_num_tokens": 5.0} for n in (0, 1, 2)], rows)
    for step, rewards in ((1, (0.0, 1.0)), (2, (1.0, 1.0))):
        add_training(made, step, rewarded(rewards, n_tasks=2, env_key="shop"))
    return made


def test_every_quantity_is_compared_with_what_the_run_took(run: RunFolder) -> None:
    write_plan(run.path / PLAN, make_plan(run))
    write_usage(run.path, Usage(from_step=0, to_step=2, seconds=46.0, peak_memory_bytes=10))
    compared = compare_plan(run)
    actual = {row.name: row.actual for row in compared.rows}
    assert actual == pytest.approx(
        {
            # 46 - 20 of steps - 18 of evaluations - 2 of two checkpoints, the last after the last row
            "startup": 4.0,
            "step": 10.0,
            "rollouts per step": 6.0,
            "learning per step": 4.0,
            "first evaluation": 10.0,
            "later evaluation": 8.0,
            "checkpoint": 2.0,
            "whole run": 46.0,
            "sampled tokens per step": actual["sampled tokens per step"],
            "response tokens per step": 20.0,
            "sampling rate": actual["sampling rate"],
            "training rate": 5.0,
            "peak memory": 10.0,
        }
    )
    differences = {row.name: row.difference for row in compared.rows}
    assert differences["step"] == pytest.approx(0.2)
    assert differences["first evaluation"] == 0.0
    (signal,) = compared.signals
    assert (signal.actual, signal.n_groups) == (0.5, 4)
    assert compared.notes == ()
    text = compared.to_text()
    assert "| step " in text
    assert "+20 %" in text
    assert compared.summarize() in text
    assert "plan and reality" in build_report_page([run])


def test_what_a_resumed_or_changed_run_cannot_say_is_left_out(run: RunFolder) -> None:
    write_plan(run.path / PLAN, make_plan(run, config={"trainer.seed": 1}))
    write_usage(run.path, Usage(from_step=1, to_step=2, seconds=5.0, peak_memory_bytes=10))
    compared = compare_plan(run)
    unknown = {row.name for row in compared.rows if row.actual is None}
    assert unknown == {"startup", "whole run"}
    assert "configuration differs" in compared.notes[0]
    assert "was resumed" in compared.notes[1]


def test_a_run_without_a_plan_and_a_damaged_plan_are_explained(run: RunFolder) -> None:
    assert "plan and reality" not in build_report_page([run])
    with pytest.raises(ConfigError, match=r"has no plan.json; run `skyfleet plan`"):
        compare_plan(open_run(run.path))
    (run.path / PLAN).write_text("{}")
    assert "the plan is not compared: " in build_report_page([run])
    with pytest.raises(RecordError, match="run `skyfleet plan` again"):
        read_plan(run.path / PLAN)


def test_the_text_of_a_plan_has_memory_signal_gains_and_dollars(run: RunFolder) -> None:
    text = format_plan(make_plan(run))
    for part in (
        "Plan of r: 3 warm-start steps, 2 steps of 8 episodes, 2 evaluations, 2 checkpoints.",
        "60.0 min    | 30.0 min to 2.0 h",
        "| rollouts | 1.00 GiB",
        "Fewer than 25 % in shop: too hard or too easy.",
        "50 x 2           | 6.1 points at best",
        "2.50               | 1.25 to 5.00",
    ):
        assert part in text, text


def test_little_signal_in_few_groups_is_remarked_as_uncertain(run: RunFolder) -> None:
    few = ExpectedSignal(
        n_groups=4, mixed_groups=Estimate(value=0.0, low=0.0, high=0.49), pass_rate=0.0
    )
    text = format_plan(make_plan(run, signals={"github": few}))
    assert "Fewer than 25 % in github (4 groups), measured in too few groups to be sure" in text
