"""RankWorker: one rank of a sharded learner, in a process of its own or beside the training loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyfleet.algorithms.sample import Sample
from skyfleet.config.root import RunConfig
from skyfleet.learner.learner import StepReport
from skyfleet.learner.loss_recorder import LossRecord, LossRecorder
from skyfleet.learner.policy_model import choose_device
from skyfleet.learner.process_ranks import ProcessRanks
from skyfleet.learner.rank_layout import build_layout
from skyfleet.learner.rank_store import RankPlace, open_rank_store
from skyfleet.learner.sharded_models import ShardedModels

__all__ = ["RankPlace", "RankReport", "RankWorker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank returns for an update."""

    report: StepReport | None
    """None after an error."""
    losses: Sequence[LossRecord] = ()
    """What the loss got: of each optimizer step, on each rank that divides the samples. On rank 0 only."""
    error: Exception | None = None
    is_within_update: bool = False
    """After an error: the weights have changed."""


class RankWorker:
    """Every rank calls the same methods with the same arguments in the same order."""

    def __init__(
        self, config: RunConfig, place: RankPlace, *, policy: str, total_steps: int
    ) -> None:
        """Join the process group and load this rank's part of the model at `policy`.

        `policy` is a Hugging Face name or a folder that every rank can read; with LoRA it is the
        base model. The run has `total_steps` steps.
        """
        layout = build_layout(config, place.world_size)
        device = _choose_rank_device(config, place)
        timeout_seconds = config.trainer.placement.rank_timeout_seconds
        _join_group(place, device, timeout_seconds)
        self._ranks = ProcessRanks(layout, device_type=device.type, timeout_seconds=timeout_seconds)
        self._losses = LossRecorder()
        self._recorded: list[LossRecord] = []
        self._models = ShardedModels(config, self._ranks, device, policy=policy)
        self._learner, self._critic = self._models.build_learner(
            total_steps=total_steps,
            wrap_settings=self._losses.wrap_settings,
            on_update=lambda: self._recorded.append(self._losses.drain().to_cpu()),
        )

    def step(self, samples: Sequence[Sample], policy_version: int) -> RankReport:
        """The update of a batch that starts from `policy_version`."""
        self._learner.policy_version = policy_version
        return self._report(self._learner.step(samples))

    def sft_step(self, samples: Sequence[Sample], policy_version: int) -> RankReport:
        self._learner.policy_version = policy_version
        return self._report(self._learner.sft_step(samples))

    def set_reference(self, folder: Path) -> None:
        """The next step loads the KL reference from `folder`, unless it has."""
        if folder != self._models.reference_folder:
            self._models.reference_folder = folder
            self._learner.renew_reference()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole weight on every rank, one after another; every rank must run it to its end.

        A process that sends weights to engines calls it on rank 0 and drains it on the others.
        """
        return self._learner.named_weights()

    def save(self, folder: Path) -> None:
        """Write the policy's part of a checkpoint; the ranks share the folder."""
        self._learner.save(folder)

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, without the optimizer."""
        self._models.save_policy(folder)

    def load(self, folder: Path) -> int:
        """Load the policy's part of a checkpoint; return its policy version."""
        self._learner.load(folder)
        return self._learner.policy_version

    def save_critic(self, folder: Path) -> None:
        if self._critic is not None:
            self._critic.save(folder)

    def load_critic(self, folder: Path) -> None:
        if self._critic is not None:
            self._critic.load(folder)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _report(self, update: Coroutine[Any, Any, StepReport]) -> RankReport:
        self._recorded.clear()
        try:
            report = asyncio.run(update)
        except Exception as error:
            self._losses.drain()
            return RankReport(
                report=None, error=error, is_within_update=self._learner.is_within_update
            )
        # Update by update: the sentinels compare the first mini-batch, before any update.
        by_rank = self._ranks.gather(self._recorded)
        losses = [record for records in zip(*by_rank, strict=True) for record in records]
        if not self._ranks.is_first:
            return RankReport(report=None)
        return RankReport(report=report, losses=losses)


def _choose_rank_device(config: RunConfig, place: RankPlace) -> torch.device:
    device = choose_device(config.trainer.device)
    if device.type != "cuda":
        return device
    # A process that sees one GPU, as an actor of Ray, calls it 0.
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join_group(place: RankPlace, device: torch.device, timeout_seconds: float) -> None:
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=place.rank,
        world_size=place.world_size,
        store=open_rank_store(place, timeout_seconds),
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
