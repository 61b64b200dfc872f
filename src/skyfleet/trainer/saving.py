"""Saving: the parts of a run that a checkpoint holds."""

from __future__ import annotations

from skyfleet.checkpoints.checkpoint import Checkpoint, JsonPart, Saveable
from skyfleet.checkpoints.resume import load_checkpoint
from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.trainer.run import Run


def parts(run: Run) -> dict[str, Saveable]:
    critic = {} if run.critic is None else {"critic": run.critic}
    return {
        # First: it says which step's policy the learner compares with.
        "trainer": JsonPart(run.state),
        "policy": run.learner,
        **critic,
        "data": JsonPart(run.sampler),
    }


def save(run: Run) -> Checkpoint:
    return save_checkpoint(
        run.checkpoints,
        run.state.step,
        parts(run),
        max_to_keep=run.schedule.max_ckpts_to_keep,
        # The policy before reinforcement is what every later one is compared with.
        protect=(0, run.state.best_step, run.state.reference_step),
    )


def load(run: Run, checkpoint: Checkpoint) -> None:
    load_checkpoint(checkpoint, parts(run))
    for engine in run.engines:
        engine.policy_version = run.learner.policy_version
    run.log.add(run.state.pending_metrics)
    run.state.pending_metrics = {}
