"""Evaluating: every named set at one step, kept as reports and trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from skyfleet.evaluation.baselines import Baseline, baseline_faults, measure_baselines
from skyfleet.evaluation.evaluate import evaluate
from skyfleet.evaluation.model_selection import best_step
from skyfleet.evaluation.report import load_report, save_report
from skyfleet.tasks.task import Task
from skyfleet.trainer.run import Run
from skyfleet.trajectories.archive import EpisodeWriter, eval_path
from skyfleet.trajectories.trajectory import Trajectory, describe_ungraded


async def evaluate_all(run: Run, step: int) -> None:
    if not run.evals.sets:
        return
    total = sum(len(tasks) for tasks in run.evals.sets.values()) * run.evals.n_samples
    with run.console.progress(f"evaluate at step {step}", total) as advance:
        for name in run.evals.sets:
            run.log.add(await _evaluate_set(run, name, step, advance))
    # A step whose evaluation was cut off before its row was written is evaluated again.
    run.state.evaluated_steps = sorted({*run.state.evaluated_steps, step})
    run.state.best_step = _best_step(run)
    run.log.add({"trainer/best_step": float(run.state.best_step)})


async def _evaluate_set(
    run: Run, name: str, step: int, advance: Callable[[], None]
) -> dict[str, float]:
    evals, tasks = run.evals, run.evals.sets[name]
    baselines = await _baselines(run, name, tasks)
    with EpisodeWriter(eval_path(run.folder / "trajectories", name, step)) as archive:

        def keep(trajectory: Trajectory) -> None:
            archive.add(trajectory)
            advance()

        report, groups = await evaluate(
            name,
            tasks,
            run.open_env,
            evals.policy,
            run.limits,
            step=step,
            n_samples=evals.n_samples,
            max_concurrent=run.max_concurrent,
            trained_envs=evals.trained_envs,
            baselines=baselines,
            played_by=evals.played_by,
            on_finished=keep,
        )
    await run.sync.confirm(run.engines)
    if unknown := describe_ungraded(groups):
        run.console.note(f"{name}: {unknown}")
    metrics = report.metrics("eval" if name == "val" else f"test-{name}")
    if evals.dump is not None:
        evals.dump(name, step, groups, metrics)
    save_report(run.folder, report)
    return metrics


async def _baselines(run: Run, name: str, tasks: Sequence[Task]) -> Mapping[str, Baseline]:
    evals = run.evals
    if name not in evals.baselines:
        evals.baselines[name] = await measure_baselines(
            [task for task in tasks if task.env_key not in evals.costly_envs],
            run.open_env,
            run.limits,
            max_concurrent=run.max_concurrent,
        )
        for sentence in baseline_faults(evals.baselines[name]):
            run.console.note(f"{name}: {sentence}")
    return evals.baselines[name]


def _best_step(run: Run) -> int:
    """By a test over all evaluations of this run; the first named set decides."""
    deciding = next(iter(run.evals.sets))
    reports = [
        report
        for step in run.state.evaluated_steps
        if (report := load_report(run.folder, deciding, step))
    ]
    graded = any(outcome.rewards for r in reports for outcome in r.outcomes.values())
    return best_step(reports).step if graded else run.state.best_step
