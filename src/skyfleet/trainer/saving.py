"""Saving: the parts of a run that a checkpoint holds."""

from __future__ import annotations

from skyfleet.checkpoints.checkpoint import Checkpoint, JsonPart, Saveable, Stateful
from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.trainer.run import Run
from skyfleet.trainer.state import TrainerState


def parts(
    state: TrainerState, learner: Saveable, critic: Saveable | None, sampler: Stateful
) -> dict[str, Saveable]:
    return {
        # First: it says which step's policy the learner compares with.
        "trainer": JsonPart(state),
        "policy": learner,
        **({} if critic is None else {"critic": critic}),
        "data": JsonPart(sampler),
    }


def save(run: Run) -> Checkpoint:
    return save_checkpoint(
        run.checkpoints,
        run.state.step,
        parts(run.state, run.learner, run.critic, run.sampler),
        max_to_keep=run.schedule.max_ckpts_to_keep,
        # The policy before reinforcement is what every later one is compared with.
        protect=(0, run.state.best_step, run.state.reference_step),
    )
