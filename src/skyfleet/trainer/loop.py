"""The loop: warm start, then rollout, credit, learn, sync, evaluate, log, save."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from skyfleet.algorithms.credit_assignment import advantage_metrics, assign_credit
from skyfleet.algorithms.filters import FilterResult
from skyfleet.errors import NoLearningSignalError
from skyfleet.metrics.rollout_metrics import episode_metrics, reward_metrics, trained_reward_metrics
from skyfleet.rollouts.episode import collect
from skyfleet.tracking.example import example
from skyfleet.trainer.evaluating import evaluate_all
from skyfleet.trainer.run import Run
from skyfleet.trainer.saving import save
from skyfleet.trainer.warm_start import warm_start
from skyfleet.trajectories.archive import EpisodeWriter, train_path
from skyfleet.trajectories.trajectory import Group, Trajectory

BATCH_STRIDE = 100_000  # steps: more than a run has, so that no two batches draw alike


async def train(run: Run) -> None:
    """From wherever the run stands to its last step. Cancelled or left ungraded, it saves what it has."""
    run.log.add(run.state.pending_metrics)
    run.state.pending_metrics = {}
    run.reach()
    try:
        await warm_start(run)
        await finish_step(run)
        while run.state.step < run.schedule.total_steps:
            run.reach()
            await train_step(run, run.state.step + 1)
            await finish_step(run)
    except (asyncio.CancelledError, NoLearningSignalError):
        # What was cut off is done again on resume: its tasks are drawn and its numbers taken anew.
        run.sampler.load_state_dict(run.place.data)
        run.state.pending_metrics = dict(run.place.metrics)
        save(run)
        raise


async def train_step(run: Run, step: int) -> None:
    path = train_path(run.folder / "trajectories", step)
    with run.log.timed("rollout"), EpisodeWriter(path) as archive:
        groups, kept = await play(run, step, archive.add)
    run.watch.played(step, groups)
    run.exports.played(step, groups)
    if run.schedule.prints_example_at(step):
        run.console.note(example(step, groups))
    for group in groups:
        run.sampler.observe(group.task_key, passed=group.n_passed, failed=group.n_failed)
    await learn(run, step, groups, kept)


async def play(
    run: Run, step: int, keep: Callable[[Trajectory], None]
) -> tuple[list[Group], FilterResult]:
    """One batch, or as many as it takes until there is enough to learn from."""
    groups: list[Group] = []
    for batch in count():
        groups += await collect(
            run.sampler.draw(),
            run.open_env,
            # A task that is drawn again in the same step is tried with other tokens.
            run.policy(step + batch * BATCH_STRIDE),
            run.limits,
            n_samples=run.n_samples,
            max_concurrent=run.max_concurrent,
            on_finished=keep,
        )
        kept = run.filter_groups(groups)
        if not kept.wants_more:
            break
    await run.sync.confirm(run.engines)
    return groups, kept


async def learn(run: Run, step: int, groups: Sequence[Group], kept: FilterResult) -> None:
    run.log.add(reward_metrics(groups) | episode_metrics(groups))
    run.log.add(trained_reward_metrics(kept.groups) | kept.metrics)
    samples = assign_credit(kept.groups, run.estimate, mask_unfinished=run.mask_unfinished)
    run.watch.credited(groups, kept, samples)
    run.exports.credited(step, samples)
    measured = advantage_metrics(samples)
    if not samples:
        learned(run, step, measured)
        return
    async with run.resting():
        with run.log.timed("learn"):
            report = await run.learner.step(samples)
        run.watch.learned(samples, report)
        # With a critic the learner gives credit, and tells of that.
        learned(run, step, {**measured, **report.metrics})
        # Where a Ctrl-C during learning is heard: it ends vLLM too, which must not be asked first.
        await asyncio.sleep(0)
        with run.log.timed("sync_weights"):
            version = await run.sync.push(run.learner, run.engines)
    run.watch.synced(version)
    run.reach()


def learned(run: Run, step: int, measured: Mapping[str, float]) -> None:
    """An interruption keeps the step. Nothing awaits between the learner and this."""
    run.log.add(measured)
    run.log.add(run.watch.told(run.log.pending))
    run.state.step = step
    run.reach()


async def finish_step(run: Run) -> None:
    """Evaluate if it is time, log the step's one row, save if it is time."""
    step = run.state.step
    if step <= run.state.logged_step:
        return
    if run.schedule.evaluates_at(step):
        with run.log.timed("eval"):
            await evaluate_all(run, step)
    run.log.add({"trainer/global_step": float(step), "trainer/epoch": float(run.sampler.epoch)})
    run.log.commit(step)
    run.state.logged_step = step
    renews_reference = run.schedule.renews_reference_at(step)
    if renews_reference:
        run.state.reference_step = step
    if run.schedule.saves_at(step) or step in (0, run.state.best_step, run.state.reference_step):
        with run.log.timed("save_checkpoints"):
            save(run)
    if renews_reference:
        run.learner.renew_reference()
    if run.schedule.exports_at(step):
        with run.log.timed("save_hf_model"):
            run.exports.policy(step)
