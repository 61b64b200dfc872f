"""Run folders as a finished run leaves them, with chosen results and without training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.fakes.small_runs import SETTINGS

from skyfleet.config.keys import dump_yaml
from skyfleet.evaluation.report import EvalReport, save_report
from skyfleet.evaluation.score import EnvScore, TaskOutcome
from skyfleet.sweeps.execution import RunFailedError
from skyfleet.sweeps.grid import build_grid
from skyfleet.sweeps.plan import SweepPlan, SweepRun, plan_sweep
from skyfleet.sweeps.record import State

N_TASKS = 60
LR = "trainer.policy.optimizer_config.lr"
ONE_SET = 'data.val_data=["world:github?split=unseen_tasks&count=3"]'


@dataclass
class ScriptedRunner:
    """Passes the first `passes(run)` of the tasks at the end, and ten of them before training."""

    passes: Callable[[SweepRun], int]
    failing: set[str] = field(default_factory=set)
    interrupted: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)

    def __call__(self, run: SweepRun) -> State:
        self.started.append(run.name)
        if run.name in self.interrupted:
            raise KeyboardInterrupt
        if run.name in self.failing:
            raise RunFailedError("exit code 2: out of memory")
        write_run(run, self.passes(run))
        return "finished"


def write_run(run: SweepRun, n_passed: int) -> None:
    assert run.total_steps is not None
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.yaml").write_text(dump_yaml(run.config))
    rows = [f'{{"step": {step}}}\n' for step in range(run.total_steps + 1)]
    (run.folder / "metrics.jsonl").write_text("".join(rows))
    for name in run.config.data.eval_sets:
        save_report(run.folder, build_report(name, 0, 10))
        save_report(run.folder, build_report(name, run.total_steps, n_passed))
    (run.folder / "report.html").write_text("<p>report</p>")


def build_report(name: str, step: int, n_passed: int) -> EvalReport:
    outcomes = {
        f"t{n:03d}": TaskOutcome(env_key="e", successes=int(n < n_passed), rewards=(0.0,))
        for n in range(N_TASKS)
    }
    overall = EnvScore.from_outcomes(list(outcomes.values()))
    return EvalReport(name=name, step=step, overall=overall, by_env={}, outcomes=outcomes)


def write_config(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """small.yaml in `folder`, which becomes the working folder."""
    patch.chdir(folder)
    Path("small.yaml").write_text(SETTINGS)


def plan_small(
    *arguments: str, n_seeds: int = 2, data_sizes: str = "", name: str = ""
) -> SweepPlan:
    grid = build_grid([*arguments, ONE_SET], n_seeds=n_seeds, data_sizes=data_sizes)
    return plan_sweep("small.yaml", grid, name=name)
