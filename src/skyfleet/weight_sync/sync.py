"""WeightSync: the interface that pushes new weights to engines, and the syncs that need no copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from skyfleet.config.generator import Generator
from skyfleet.config.root import RunConfig
from skyfleet.engines.engine import Engine, HasDecoder
from skyfleet.engines.engine_pool import EnginePool
from skyfleet.errors import SentinelError
from skyfleet.learner.learner import Learner
from skyfleet.models.lora import merged_state_dict
from skyfleet.models.weights import weight_checksum
from skyfleet.weight_transfer.buckets import BYTES_PER_GB, TransferReport
from skyfleet.weight_transfer.delta_publisher import DeltaPublisher

if TYPE_CHECKING:
    from skyfleet.weight_sync.vllm import OpenPublisher


class WeightSync(Protocol):
    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        """Send the learner's weights to all engines; return the policy version they now serve."""
        ...

    async def verify(self, engines: Sequence[Engine]) -> None:
        """SentinelError if an engine has sampled with other weights since the last push."""
        ...


class InProcessSync:
    """For engines that share the learner's tensors: only the version changes."""

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        for engine in engines:
            engine.policy_version = learner.policy_version
        return learner.policy_version

    async def verify(self, engines: Sequence[Engine]) -> None: ...


class CopySync:
    """For engines of this process that have weights of their own: `module`, without adapters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @torch.no_grad()
    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        held = self._module.state_dict()  # shares the tensors
        received: set[str] = set()
        for name, weight in learner.named_weights():
            held[name].copy_(weight)
            sent = weight_checksum(weight.to(held[name].dtype))
            if not torch.equal(sent.to(held[name].device), weight_checksum(held[name])):
                raise SentinelError(f"weight sync: the engine's copy of {name} differs")
            received.add(name)
        if missing := held.keys() - received:
            raise SentinelError(
                f"weight sync: {len(missing)} weights were not sent, such as {min(missing)}"
            )
        for engine in engines:
            engine.policy_version = learner.policy_version
        return learner.policy_version

    async def verify(self, engines: Sequence[Engine]) -> None: ...


class PausedSync:
    """Pauses the engine pool during a push. Turns that the push aborts continue afterwards."""

    def __init__(self, sync: WeightSync, pool: EnginePool) -> None:
        self._sync, self._pool = sync, pool

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        async with self._pool.paused(wait=False):
            return await self._sync.push(learner, engines)

    async def verify(self, engines: Sequence[Engine]) -> None:
        await self._sync.verify(engines)

    @property
    def report(self) -> TransferReport | None:
        return find_report(self._sync)


def find_report(sync: WeightSync) -> TransferReport | None:
    """What the last push moved; None for a sync that moves nothing, or has not been asked to."""
    report: TransferReport | None = getattr(sync, "report", None)
    return report


def has_own_weights(config: RunConfig) -> bool:
    """Whether the engine of this process has other tensors than the learner."""
    trainer = config.trainer
    is_apart = trainer.fully_async.enabled or trainer.strategy == "fsdp"
    return is_apart and config.generator.backend == "embedded"


def build_weight_sync(
    config: RunConfig, module: nn.Module, engine: Engine, learner: Learner
) -> WeightSync:
    """How weights of the learner get to `engine`, which may be a pool.

    `module` has them in this process, unless the learner is sharded.
    """
    if config.generator.backend == "embedded":
        if has_own_weights(config) and isinstance(engine, HasDecoder):
            return CopySync(engine.decoder.module)
        return InProcessSync()
    from skyfleet.weight_sync.vllm import VllmSync

    generator = config.generator
    sync = VllmSync(
        learner.named_weights
        if config.trainer.strategy == "fsdp"
        else lambda: merged_state_dict(module).items(),
        folder=generator.weight_sync_dir,
        deltas=_open_deltas(generator) if generator.weight_sync_backend == "delta" else None,
    )
    return PausedSync(sync, engine) if isinstance(engine, EnginePool) else sync


def _open_deltas(generator: Generator) -> OpenPublisher:
    settings = generator.delta_weight_sync
    sync_dir, max_file_bytes = settings.sync_dir, int(settings.max_file_size_in_gb * BYTES_PER_GB)
    assert sync_dir is not None  # validated
    return lambda dtype: DeltaPublisher(sync_dir, dtype=dtype, max_file_bytes=max_file_bytes)
