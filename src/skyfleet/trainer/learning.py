"""Build what learns: one learner in this process, or ranks in several."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from skyfleet.checkpoints.checkpoint import (
    Saveable,
    checkpoint_folder,
    read_checkpoint,
)
from skyfleet.checkpoints.resume import verify_part
from skyfleet.cluster.cluster import Cluster
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError
from skyfleet.learner.factory import build_critic, build_learner
from skyfleet.learner.loss_recorder import LossRecorder
from skyfleet.learner.policy_model import PolicyModel
from skyfleet.learner.sharded import ShardedLearner
from skyfleet.learner.single_device import SingleDeviceLearner
from skyfleet.trainer.run import TrainerState
from skyfleet.trainer.sharded_run import build_sharded_learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    state: TrainerState
    learner: SingleDeviceLearner | ShardedLearner
    critic: Saveable | None
    losses: LossRecorder


async def build_learning(
    config: RunConfig,
    policy_model: PolicyModel,
    state: TrainerState,
    total_steps: int,
    cluster: Cluster | None,
    *,
    weights_folder: Path | None,
    opened: AsyncExitStack,
    memory_plan: str,
) -> Learning:
    checkpoints, losses = Path(config.trainer.ckpt_path), LossRecorder()

    def find_reference() -> Path:
        return _find_reference(checkpoint_folder(checkpoints, state.reference_step))

    if config.trainer.strategy == "fsdp":
        sharded, sharded_critic = await build_sharded_learner(
            config,
            policy_model,
            find_reference,
            open_group=None if cluster is None else partial(cluster.open_ranks, config),
            weights_folder=weights_folder,
            total_steps=total_steps,
            losses=losses,
            opened=opened,
        )
        return Learning(state=state, learner=sharded, critic=sharded_critic, losses=losses)
    critic = build_critic(config, policy_model, total_steps=total_steps)
    learner = build_learner(
        config,
        policy_model,
        find_reference,
        total_steps=total_steps,
        critic=critic,
        wrap_settings=losses.wrap_settings,
        memory_plan=memory_plan,
    )
    return Learning(state=state, learner=learner, critic=critic, losses=losses)


def _find_reference(folder: Path) -> Path:
    """The policy of the checkpoint that is the KL reference, its files verified."""
    if not folder.exists():
        return folder / "policy"
    try:
        return verify_part(read_checkpoint(folder), "policy")
    except CheckpointError as error:
        raise CheckpointError(f"the KL reference cannot be loaded: {error}") from None
