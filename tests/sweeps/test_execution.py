"""Running a sweep: failures are recorded, finished runs are not repeated, the rest goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.sweeps.scripted_runs import LR, ScriptedRunner, plan_small, write_config, write_run

from skyfleet.errors import ConfigError
from skyfleet.sweeps.execution import Runner, hold_sweep, run_sweep
from skyfleet.sweeps.plan import SweepPlan, SweepRun
from skyfleet.sweeps.record import State, find_state, read_record

FIRST, SECOND, THIRD, FOURTH = (
    f"small-lr-{value}-seed{seed}" for seed in (42, 43) for value in ("1e-2", "1e-3")
)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepPlan:
    write_config(tmp_path, monkeypatch)
    return plan_small(f"{LR}=1e-2,1e-3")


def states(plan: SweepPlan) -> dict[str, str]:
    record = read_record(plan.folder)
    return {run.name: find_state(run, record) for run in plan.runs}


def run(plan: SweepPlan, runner: Runner) -> list[str]:
    lines: list[str] = []
    with hold_sweep(plan.folder, lines.append):
        run_sweep(plan, runner, lines.append)
    return lines


def test_a_failed_run_is_recorded_the_others_go_on_and_only_it_is_tried_again(
    plan: SweepPlan,
) -> None:
    runner = ScriptedRunner(passes=lambda _: 20, failing={SECOND})
    lines = run(plan, runner)
    assert f"run 2 of 4, {SECOND}: failed: exit code 2: out of memory" in lines
    assert states(plan) == {
        FIRST: "finished",
        SECOND: "failed",
        THIRD: "finished",
        FOURTH: "finished",
    }
    assert read_record(plan.folder).get(SECOND).error == "exit code 2: out of memory"
    again = ScriptedRunner(passes=lambda _: 20)
    run(plan, again)
    assert again.started == [SECOND]
    assert read_record(plan.folder).get(SECOND).error == ""


def test_an_interrupted_sweep_goes_on_with_the_run_that_was_interrupted(plan: SweepPlan) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(plan, ScriptedRunner(passes=lambda _: 20, interrupted={SECOND}))
    assert list(states(plan).values()) == ["finished", "started", "waiting", "waiting"]
    again = ScriptedRunner(passes=lambda _: 20)
    run(plan, again)
    assert again.started == [SECOND, THIRD, FOURTH]


def test_folders_decide_if_the_record_is_lost_and_a_removed_folder_runs_again(
    plan: SweepPlan,
) -> None:
    run(plan, ScriptedRunner(passes=lambda _: 20))
    (plan.folder / "sweep.json").unlink()
    assert set(states(plan).values()) == {"finished"}
    (plan.runs[0].folder / "report.html").unlink()
    assert states(plan)[FIRST] == "waiting"
    (plan.folder / "sweep.json").write_text(json.dumps({"runs": 3}))
    with pytest.raises(ConfigError, match=r"sweep.json cannot be read; move it away"):
        read_record(plan.folder)


def test_more_steps_continue_finished_runs_and_fewer_are_refused(plan: SweepPlan) -> None:
    run(plan, ScriptedRunner(passes=lambda _: 20))
    longer = plan_small(f"{LR}=1e-2,1e-3", "trainer.max_training_steps=4")
    assert set(states(longer).values()) == {"waiting"}
    shorter = plan_small(f"{LR}=1e-2,1e-3", "trainer.max_training_steps=2")
    with pytest.raises(ConfigError, match="has 3 steps and this sweep only 2; give the sweep"):
        states(shorter)


def test_more_values_and_seeds_add_runs_to_the_finished_ones(plan: SweepPlan) -> None:
    run(plan, ScriptedRunner(passes=lambda _: 20))
    runner = ScriptedRunner(passes=lambda _: 20)
    run(plan_small(f"{LR}=1e-2,1e-3,1e-4", n_seeds=3), runner)
    assert runner.started == [
        f"small-lr-{name}"
        for name in ("1e-4-seed42", "1e-4-seed43", "1e-2-seed44", "1e-3-seed44", "1e-4-seed44")
    ]


def test_a_launched_run_is_not_launched_again_and_is_finished_once_its_folder_is_here(
    plan: SweepPlan,
) -> None:
    launched: list[str] = []

    def launch(one: SweepRun) -> State:
        launched.append(one.name)
        return "launched"

    run(plan, launch)
    run(plan, launch)
    assert launched == [FIRST, SECOND, THIRD, FOURTH]
    assert set(states(plan).values()) == {"launched"}
    write_run(plan.runs[0], 20)
    assert states(plan)[FIRST] == "finished"


def test_two_processes_do_not_run_the_same_sweep(plan: SweepPlan) -> None:
    lines: list[str] = []
    with (
        hold_sweep(plan.folder, lines.append),
        pytest.raises(ConfigError, match=r"is in use by another sweep .* give --name another name"),
        hold_sweep(plan.folder, lines.append),
    ):
        pass
