"""A run with a sharded learner: its ranks, and what the processes beside rank 0 do."""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.learner.factory import needs_reference
from skyfleet.learner.loss_recorder import LossRecorder
from skyfleet.learner.policy_model import PolicyModel
from skyfleet.learner.rank_layout import build_layout
from skyfleet.learner.rank_process import read_place, serve_rank
from skyfleet.learner.sharded import RankGroup, ShardedCritic, ShardedLearner
from skyfleet.learner.torchrun import TorchrunGroup
from skyfleet.models.loading import save_model
from skyfleet.trainer.policy_client import loadable_path

logger = logging.getLogger(__name__)


def check_ranks(config: RunConfig) -> None:
    """ConfigError for ranks that the configuration cannot use, before anything is loaded."""
    world_size, placement = read_place().world_size, config.trainer.placement
    if config.trainer.strategy != "fsdp":
        if world_size > 1:
            raise ConfigError(
                f"trainer.strategy={config.trainer.strategy} trains in one process, and torchrun "
                f"started {world_size}; set trainer.strategy=fsdp or start one"
            )
        return
    build_layout(config, world_size)
    planned = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    if planned not in (1, world_size):
        key = "trainer.placement.policy_num_nodes x policy_num_gpus_per_node"
        if world_size > 1:
            raise ConfigError(
                f"{key}={planned}, and torchrun started {world_size} ranks; start {planned} or leave "
                "the keys out"
            )
        logger.warning(
            "%s=%s has no effect: one rank was started; start them with torchrun", key, planned
        )


OpenGroup = Callable[[str, int], Awaitable[RankGroup]]
"""Starts the ranks with the policy at a path, for a run of so many steps."""


async def build_sharded_learner(
    config: RunConfig,
    policy_model: PolicyModel,
    find_reference: Callable[[], Path],
    *,
    weights_folder: Path | None,
    total_steps: int,
    losses: LossRecorder,
    opened: AsyncExitStack,
    open_group: OpenGroup | None = None,
) -> tuple[ShardedLearner, ShardedCritic | None]:
    """The ranks load the policy from where this process has it, or from what it writes for them.

    The engine of this process samples with the weights of `policy_model`. `opened` ends the ranks.
    `open_group` starts them; without it they are those of torchrun.
    """
    policy_model.loaded.module.requires_grad_(False)
    source = loadable_path(config, weights_folder)
    if source is None:
        source = opened.enter_context(TemporaryDirectory(prefix="skyfleet-policy-"))
        save_model(policy_model.loaded, Path(source))
    group: RankGroup
    if open_group is None:
        group = TorchrunGroup(config, read_place(), policy=source, total_steps=total_steps)
    else:
        group = await open_group(source, total_steps)
    opened.callback(group.close)
    learner = ShardedLearner(
        group,
        reference_folder=find_reference if needs_reference(config) else None,
        losses=losses,
    )
    has_critic = config.trainer.critic.model.path is not None
    return learner, ShardedCritic(group) if has_critic else None


def serve_other_rank(config: RunConfig) -> bool:
    """Whether this process is a rank other than 0, which has then served it to its end."""
    place = read_place()
    if place.rank == 0:
        return False
    check_ranks(config)
    # Rank 0 gets the same signals, saves a checkpoint with the help of all ranks, and ends them.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def ignore_sigterm() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    serve_rank(place, config.trainer.placement.rank_timeout_seconds, on_connected=ignore_sigterm)
    return True
