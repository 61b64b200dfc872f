"""The asynchronous loop (`trainer.fully_async`): groups are trained on while later ones are played.

Its steps are those of `loop.py`. Episodes go on during an update, on the engine's own copy of the
weights, and over the weight sync after it. docs/async_training.md states the rules.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from skyfleet.trainer.callbacks import StepResult
from skyfleet.trainer.group_rollouts import GroupRollouts
from skyfleet.trainer.loop import (
    begin_training,
    end_step,
    inspect_rollouts,
    learn,
    saving_on_error,
)
from skyfleet.trainer.run import Run
from skyfleet.trajectories.archive import EpisodeWriter, train_path
from skyfleet.trajectories.trajectory import Group


async def train_steps_async(run: Run, rollouts: GroupRollouts) -> AsyncIterator[StepResult]:
    """Train step by step. Whatever ends the run early, what was learnt is saved first."""
    try:
        await begin_training(run)
        while run.state.step < run.schedule.total_steps and not run.callbacks.stop_requested:
            step = run.state.step + 1
            with saving_on_error(run, step):
                run.mark_resume_point()
                groups = await train_step(run, rollouts, step)
                result = await end_step(run, groups)
            yield result
    finally:
        await rollouts.close()


async def train_step(run: Run, rollouts: GroupRollouts, step: int) -> list[Group]:
    run.check_locks()
    rollouts.advance(step)
    with run.log.timed("rollout"):
        taken = await rollouts.take()
        await run.inference.verify()
    run.log.add(taken.metrics)
    with EpisodeWriter(train_path(run.folder / "trajectories", step)) as archive:
        for trajectory, line in taken.episodes:
            archive.add(trajectory, line)
            run.callbacks.episode(trajectory)
    if taken.restored:
        run.console.note(f"step {step}: {len(taken.restored)} rollouts from the journal")
    inspect_rollouts(run, step, taken.groups, restored=taken.restored, is_open=taken.is_open)
    await learn(run, step, taken.groups, taken.kept)
    if rollouts.groups.max_staleness_steps and not run.callbacks.stop_requested:
        # Before evaluation and checkpoint, so that the engine has work meanwhile.
        rollouts.advance(step + 1)
    return taken.groups
