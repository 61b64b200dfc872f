"""RankWorker: one rank of a sharded learner, in a process of its own or beside the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from skyfleet.algorithms.sample import Sample
from skyfleet.config.root import RunConfig
from skyfleet.learner.learner import StepReport
from skyfleet.learner.loss_recorder import LossRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank a process is, and where the ranks meet."""

    rank: int
    world_size: int
    address: str
    """HOST:PORT of the store at which the ranks meet; rank 0 opens it, unless it is open."""
    local_rank: int = 0
    """Of the ranks on this machine; the index of its GPU."""
    store_is_open: bool = False
    """Another process serves the store, as torchrun does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank returns for an update."""

    report: StepReport | None
    """None after an error."""
    losses: Sequence[LossRecord] = ()
    """What the loss got on each data-parallel rank; on rank 0 only."""
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
        raise NotImplementedError

    def step(self, samples: Sequence[Sample], policy_version: int) -> RankReport:
        """The update of a batch that starts from `policy_version`."""
        raise NotImplementedError

    def sft_step(self, samples: Sequence[Sample], policy_version: int) -> RankReport:
        raise NotImplementedError

    def set_reference(self, folder: Path) -> None:
        """The next step loads the KL reference from `folder`."""
        raise NotImplementedError

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole weight on every rank, one after another; every rank must run it to its end.

        A process that sends weights to engines calls it on rank 0 and drains it on the others.
        """
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write the policy's part of a checkpoint; the ranks share the folder."""
        raise NotImplementedError

    def load(self, folder: Path) -> int:
        """Load the policy's part of a checkpoint; return its policy version."""
        raise NotImplementedError

    def save_critic(self, folder: Path) -> None:
        raise NotImplementedError

    def load_critic(self, folder: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Leave the process group."""
        raise NotImplementedError
