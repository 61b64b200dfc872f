"""A plan measures the first steps of a run, and the finished run shows how good it was."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fakes.small_runs import UNSEEN, small_config
from typer.testing import CliRunner

from skyfleet.analysis.plan_comparison import compare_plan
from skyfleet.analysis.run_folder import open_run
from skyfleet.analysis.run_plan import PLAN, QUANTITIES, read_plan, write_plan
from skyfleet.cli.main import app
from skyfleet.trainer.plan_run import plan_run
from skyfleet.trainer.training_run import run_training

OVERRIDES = (
    f"data.val_data={{unseen: ['{UNSEEN}']}}",
    "trainer.epochs=1",
    "trainer.eval_interval=2",
)


async def test_a_plan_leaves_no_trace_and_its_run_is_compared_with_it(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", *OVERRIDES)
    plan = await plan_run(config, n_steps=2, eval_episodes=8)
    assert os.listdir(tmp_path) == []
    assert plan.quantities.keys() == QUANTITIES.keys()
    for name, estimate in plan.quantities.items():
        assert 0 < estimate.low <= estimate.value <= estimate.high or name == "step", name
    assert (plan.n_steps, plan.n_evaluations, plan.n_checkpoints) == (2, 2, 2)
    assert [phase.name for phase in plan.memory] == ["rollouts", "update"]
    assert plan.signals["github"].n_groups == 4
    assert plan.detectable["unseen"].low is None  # three tasks show nothing
    write_plan(tmp_path / "run" / PLAN, plan)
    assert read_plan(tmp_path / "run" / PLAN) == plan

    outcome = await run_training(config)
    compared = compare_plan(open_run(outcome.folder))
    assert all(row.actual for row in compared.rows)
    assert compared.notes == ()
    assert (outcome.folder / "plan.md").read_text() == f"{compared.to_text()}\n"
    # The same seed samples the same episodes, so the tokens are those of the plan.
    tokens = {row.name: row.difference for row in compared.rows}["sampled tokens per step"]
    assert tokens is not None
    assert abs(tokens) < 0.5


def test_a_plan_is_not_written_over_the_plan_of_a_started_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    result = CliRunner().invoke(app, ["plan", f"trainer.run_path={tmp_path}"])
    assert "holds a run that has started" in str(result.exception)
    assert not (tmp_path / PLAN).exists()
    result = CliRunner().invoke(app, ["plan", f"trainer.run_path={tmp_path / 'new'}"])
    assert "data.train_data is empty; name the configuration" in str(result.exception)
    result = CliRunner().invoke(app, ["plan", "--compare", str(tmp_path)])
    assert "is not a run folder" in str(result.exception)
