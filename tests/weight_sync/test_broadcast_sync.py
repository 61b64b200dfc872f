"""BroadcastSync: every engine of a transfer group serves the pushed version, or the push fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.fakes.weight_receivers import LORA, SmallModel, sums
from torch import Tensor, nn

from skyfleet.errors import ConfigError, SentinelError
from skyfleet.models.lora import add_adapters, merge, merged_state_dict
from skyfleet.weight_sync.broadcast import (
    BroadcastSync,
    send_adapters,
    send_weights,
    sender_options,
)
from skyfleet.weight_sync.sync import InProcessSync, find_report
from skyfleet.weight_transfer.receiver import WeightReceiver
from skyfleet.weight_transfer.sender import WeightSender
from skyfleet.weight_transfer.targets import AdapterWeights, ModuleWeights, named_adapters


class StudentOf:
    """The part of a learner that the sync uses."""

    policy_version = 4

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from merged_state_dict(self.module).items()


class OtherProcess:
    """An engine whose receiver is in a thread, in place of a process."""

    def __init__(self, module: nn.Module, address: str, *, merges: bool = False) -> None:
        self.module, self.policy_version = module, 0
        self._target = AdapterWeights(module) if merges else ModuleWeights(module)
        self._receiver = WeightReceiver(address, rank=1, world_size=2, backend="ipc")

    async def receive_weights(self, *, policy_version: int) -> None:
        await asyncio.to_thread(self._receiver.receive, self._target, version=policy_version)


async def push(module: nn.Module, copied: nn.Module, *, merges: bool = False) -> BroadcastSync:
    sender = WeightSender("127.0.0.1:0", world_size=2, backend="ipc", bucket_bytes=10_000)
    engine = OtherProcess(copied, sender.address, merges=merges)
    send = send_adapters(sender, module) if merges else send_weights(sender)
    sync, student, engines = BroadcastSync(send), StudentOf(module), [engine]
    assert await sync.push(student, engines) == 4  # type: ignore[arg-type]
    assert engine.policy_version == 4
    return sync


async def test_engines_hold_the_learners_weights_and_the_sync_reports_what_it_moved() -> None:
    module, copied = SmallModel(seed=1), SmallModel(seed=2)
    sync = await push(module, copied)
    assert sums(copied) == sums(module)
    report = find_report(sync)
    assert report is not None
    assert set(report.metrics) == {"weight_sync/bytes", "weight_sync/seconds_per_gb"}
    assert find_report(InProcessSync()) is None


async def test_adapters_alone_make_an_engine_with_the_same_base_the_learners_policy() -> None:
    module, copied = SmallModel(seed=1), SmallModel(seed=1)
    for one in (module, copied):
        add_adapters(one, LORA, seed=5)
    with torch.no_grad():
        for _, weight in named_adapters(module):
            weight.add_(0.1)
    merge(module)
    await push(module, copied, merges=True)
    assert sums(copied) == sums(module)


async def test_another_model_stops_the_run_and_an_engine_without_a_receiver_is_refused() -> None:
    with pytest.raises(SentinelError, match=r"engine rank 1: .*was sent with shape \(64, 32\)"):
        await push(SmallModel(seed=1), SmallModel(vocab_size=32))
    engines: Any = [object()]
    with pytest.raises(ConfigError, match="cannot update the weights of a object"):
        await BroadcastSync(send_weights(None)).push(StudentOf(SmallModel()), engines)  # type: ignore[arg-type]


def test_a_sender_is_configured_by_skyrls_keys() -> None:
    from skyfleet.config.loading import load_config

    config = load_config(
        "",
        [
            "generator.inference_engine.weight_sync_backend=gloo",
            "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB=0.5",
        ],
    )
    assert sender_options(config.generator, same_gpu=False) == {
        "backend": "gloo",
        "bucket_bytes": 500_000_000,
        "dtype": torch.bfloat16,
    }
    assert sender_options(config.generator, same_gpu=True)["backend"] == "ipc"
