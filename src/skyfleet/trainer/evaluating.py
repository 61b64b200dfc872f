"""Evaluating: every named set at one step, kept as reports and trajectories."""

from __future__ import annotations

from pathlib import Path

from skyfleet.evaluation.evaluate import evaluate
from skyfleet.evaluation.report import EvalReport
from skyfleet.storage.local import write_atomically
from skyfleet.trainer.run import Run
from skyfleet.trajectories.archive import eval_path, write_groups


async def evaluate_all(run: Run, step: int) -> None:
    total = sum(len(tasks) for tasks in run.eval_sets.values()) * run.eval_n_samples
    with run.console.progress(f"evaluate at step {step}", total) as advance:
        for name, tasks in run.eval_sets.items():
            report, groups = await evaluate(
                name,
                tasks,
                run.open_env,
                run.eval_policy,
                run.limits,
                step=step,
                n_samples=run.eval_n_samples,
                max_concurrent=run.max_concurrent,
                on_finished=lambda _: advance(),
            )
            write_groups(eval_path(run.folder / "trajectories", name, step), groups)
            path = report_path(run.folder, name, step)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, report.to_json())
            run.log.add(report.metrics("eval" if name == "val" else f"test-{name}"))


def report_path(folder: Path, name: str, step: int) -> Path:
    return folder / "reports" / f"step_{step:06d}" / f"{name}.json"


def read_report(folder: Path, name: str, step: int) -> EvalReport | None:
    path = report_path(folder, name, step)
    return EvalReport.from_json(path.read_text()) if path.exists() else None
