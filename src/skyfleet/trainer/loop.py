"""The training loop: rollouts, credit assignment, policy update, weight sync, evaluation, checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from skyfleet.algorithms.credit_assignment import advantage_metrics
from skyfleet.algorithms.filters import FilterResult
from skyfleet.metrics.rollout_metrics import (
    episode_metrics,
    reward_metrics,
    trained_reward_metrics,
)
from skyfleet.tracking.console import format_example
from skyfleet.trainer.callbacks import StepResult
from skyfleet.trainer.run import Run
from skyfleet.trainer.saving import save_progress
from skyfleet.trainer.sft import warm_start
from skyfleet.trajectories.archive import EpisodeWriter, train_path
from skyfleet.trajectories.trajectory import Group, Trajectory, find_failure


async def train_steps(run: Run) -> AsyncIterator[StepResult]:
    """Train step by step. Whatever ends the run early, what was learnt is saved first."""
    await begin_training(run)
    while run.state.step < run.schedule.total_steps and not run.callbacks.stop_requested:
        step = run.state.step + 1
        with saving_on_error(run, step):
            run.mark_resume_point()
            groups = await train_step(run, step)
            result = await end_step(run, groups)
        yield result


async def begin_training(run: Run) -> None:
    """The warm start and the evaluation before training, unless the run resumes after them."""
    run.log.add(run.state.take_pending_metrics())
    run.mark_resume_point()
    run.alerts.report_start(run.state.step, run.schedule.total_steps)
    with saving_on_error(run, run.state.step):
        await warm_start(run)
        await finish_step(run)


async def end_step(run: Run, groups: Sequence[Group]) -> StepResult:
    result = StepResult(number=run.state.step, groups=groups, metrics=run.log.pending)
    run.callbacks.step(result)
    result.metrics.update(await finish_step(run, stopping=run.callbacks.stop_requested))
    return result


@contextmanager
def saving_on_error(run: Run, step: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        run.alerts.report_stop(error, step)
        save_progress(run, error, step)
        raise


async def train_step(run: Run, step: int) -> list[Group]:
    path = train_path(run.folder / "trajectories", step)
    run.check_locks()
    journal = run.journal.open_step(step, policy_version=run.learner.policy_version)
    with run.log.timed("rollout"), EpisodeWriter(path) as archive, journal:

        def store(trajectory: Trajectory, line: bytes) -> None:
            archive.add(trajectory, line)
            run.callbacks.episode(trajectory)

        groups, kept = await run.rollouts.collect(step, store, journal)
        await run.inference.verify()
    run.log.add({"timing/journal": journal.seconds})
    if sentence := journal.describe(groups):
        run.console.note(sentence)
    inspect_rollouts(run, step, groups, restored=journal.restored)
    await learn(run, step, groups, kept)
    return groups


def inspect_rollouts(
    run: Run,
    step: int,
    groups: Sequence[Group],
    *,
    restored: Sequence[Trajectory],
    is_open: Callable[[str], bool] = lambda _: False,
) -> None:
    """Check, dump and show the groups of a step, and tell the sampler their outcomes."""
    run.checker.check_rollouts(step, groups, restored=restored, is_open=is_open)
    run.exports.dump_trajectories(step, groups)
    if run.schedule.prints_example_at(step):
        run.console.note(format_example(step, groups))
    if not any(group.graded for group in groups) and (failure := find_failure(groups)):
        run.console.explain(failure)
    for group in groups:
        run.rollouts.sampler.observe(group.task_key, passed=group.n_passed, failed=group.n_failed)


async def learn(run: Run, step: int, groups: Sequence[Group], kept: FilterResult) -> None:
    run.log.add(reward_metrics(groups) | episode_metrics(groups))
    run.log.add(trained_reward_metrics(kept.groups) | kept.metrics)
    samples = run.compute_samples(kept.groups)
    run.checker.check_advantages(groups, kept, samples)
    run.exports.dump_training_input(step, samples)
    measured = advantage_metrics(samples)
    if not samples:
        complete_update(run, step, measured)
        return
    async with run.inference.offload():
        with run.log.timed("learn"):
            report = await run.learner.step(samples)
        run.checker.check_update(samples, report)
        # With a critic the learner computes the advantages and reports their metrics.
        complete_update(run, step, {**measured, **report.metrics})
        # A pending cancellation takes effect here: Ctrl-C also ends vLLM, so do not call it first.
        await asyncio.sleep(0)
        with run.log.timed("sync_weights"):
            version = await run.inference.push(run.learner)
        run.log.add(run.inference.sync_metrics)
    run.checker.check_sync(version)
    run.mark_resume_point()


def complete_update(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """Count the step as done. Nothing awaits between the update and this, so none is lost."""
    run.log.add(metrics)
    run.log.add(run.checker.check_metrics(run.log.pending))
    run.state.step = step
    run.mark_resume_point()


async def finish_step(run: Run, *, stopping: bool = False) -> dict[str, float]:
    """Evaluate, log the step's row, save and export, each if it is due. Returns the row."""
    step = run.state.step
    if step <= run.state.logged_step:
        # The process that logged it may have ended before its export.
        export_policy(run, step, again=False)
        return {}
    if run.schedule.evaluates_at(step) or (stopping and run.schedule.eval_interval > 0):
        run.check_locks()
        with run.log.timed("eval"):
            await evaluate_step(run, step)
    run.log.add(
        {"trainer/global_step": float(step), "trainer/epoch": float(run.rollouts.sampler.epoch)}
    )
    run.log.add(run.uploads.metrics)
    row = run.log.pending
    run.check_locks()
    run.log.commit(step)
    run.state.logged_step = step
    # The row has these metrics now: an error while saving must not put them into the next one.
    run.mark_resume_point()
    run.uploads.publish(step)
    renews_reference = run.schedule.renews_reference_at(step)
    if renews_reference:
        run.state.reference_step = step
    protected = (0, run.state.best_step, run.state.reference_step)
    if run.schedule.saves_at(step) or stopping or step in protected:
        with run.log.timed("save_checkpoints"):
            run.save()
    if renews_reference:
        run.learner.renew_reference()
    export_policy(run, step)
    return row


def export_policy(run: Run, step: int, *, again: bool = True) -> None:
    if run.schedule.exports_at(step) and (again or not run.exports.has_policy(step)):
        with run.log.timed("save_hf_model"):
            run.exports.export_policy(step)


async def evaluate_step(run: Run, step: int) -> None:
    if not run.evaluator.sets:
        return
    run.log.add(await run.evaluator.evaluate_all(step))
    # If the run is killed before the row is logged, the step is evaluated again on resume.
    run.state.evaluated_steps = sorted({*run.state.evaluated_steps, step})
    run.state.best_step = run.evaluator.select_best_step(
        run.state.evaluated_steps, default=run.state.best_step
    )
    run.log.add({"trainer/best_step": float(run.state.best_step)})
    run.alerts.report_evaluation(step, list(run.evaluator.sets))
