"""BroadcastSync: push weights in buckets to engines in other processes, which verify them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from skyfleet.config.generator import Generator
from skyfleet.engines.engine import Engine
from skyfleet.errors import ConfigError
from skyfleet.learner.learner import Learner
from skyfleet.weight_transfer.buckets import BYTES_PER_GB, TransferReport
from skyfleet.weight_transfer.sender import WeightSender
from skyfleet.weight_transfer.targets import named_adapters, sum_weights

Send = Callable[[Learner, int], Awaitable[TransferReport]]
"""Sends the learner's weights as a version, from the process that has them."""


@runtime_checkable
class ReceivingEngine(Protocol):
    """An engine whose process is a receiver of the sender's transfer group."""

    policy_version: int

    async def receive_weights(self, *, policy_version: int) -> None:
        """Run `WeightReceiver.receive` there; it returns when the engine holds the weights."""
        ...


class BroadcastSync:
    """The sender and all engines at once. One error on each side: the sender's names the engine."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.report: TransferReport | None = None

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        version = learner.policy_version
        receiving = [_as_receiving(engine) for engine in engines]
        results = await asyncio.gather(
            self._send(learner, version),
            *(engine.receive_weights(policy_version=version) for engine in receiving),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        report = results[0]
        assert isinstance(report, TransferReport)
        self.report = report
        for engine in receiving:
            engine.policy_version = version
        return version

    async def verify(self, engines: Sequence[Engine]) -> None:
        """Nothing else writes to an engine that is in the group; each push was verified."""


def send_weights(sender: WeightSender) -> Send:
    """All weights, for engines that hold whole ones, from a learner in this process."""

    async def send(learner: Learner, version: int) -> TransferReport:
        return await asyncio.to_thread(sender.send, learner.named_weights(), version=version)

    return send


def send_adapters(sender: WeightSender, module: nn.Module) -> Send:
    """Only the LoRA adapters of `module`, for engines that merge them (`AdapterWeights`)."""

    async def send(_: Learner, version: int) -> TransferReport:
        return await asyncio.to_thread(
            sender.send,
            named_adapters(module),
            version=version,
            computed=lambda: sum_weights(module),
        )

    return send


def sender_options(generator: Generator, *, same_gpu: bool) -> dict[str, Any]:
    """Arguments of `WeightSender` by SkyRL's keys; `same_gpu` if every engine is on the learner's."""
    return {
        "backend": "ipc" if same_gpu else generator.weight_sync_backend,
        "bucket_bytes": int(generator.weight_transfer_threshold_cuda_ipc_GB * BYTES_PER_GB),
        "dtype": getattr(torch, generator.model_dtype),
    }


def _as_receiving(engine: Engine) -> ReceivingEngine:
    if not isinstance(engine, ReceivingEngine):
        raise ConfigError(f"BroadcastSync cannot update the weights of a {type(engine).__name__}")
    return engine
