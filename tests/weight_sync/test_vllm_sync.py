"""VllmSync against a fake worker that loads the same file: every weight is sent and verified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.loopback_vllm import WorkerExtension, forget_weights, replace_weights
from tests.fakes.tiny_policy import tiny_policy
from torch import Tensor

from skyfleet.engines import vllm_worker
from skyfleet.engines.vllm_controller import VllmSettings
from skyfleet.engines.vllm_engine import VllmEngine
from skyfleet.errors import SentinelError
from skyfleet.learner.learner import Learner
from skyfleet.models.lora import merged_state_dict
from skyfleet.models.weights import weight_checksum
from skyfleet.weight_sync.vllm import ExpectedChecksums, VllmSync
from skyfleet.weight_transfer.delta_publisher import DeltaPublisher
from skyfleet.weight_transfer.sender import WeightSender


class Worker:
    """Stands in for vLLM: holds the weights it loads, with the tensor `spoiled` replaced by zeros.

    With `reports`, it reports checksums only of received tensors with these names, and of none it holds.
    """

    def __init__(self, *, spoiled: str = "", reports: Callable[[str], bool] | None = None) -> None:
        self.held: dict[str, Tensor] = {}
        self._spoiled, self._reports = spoiled, reports

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "skyfleet_device":
            return ["cpu"]
        if method == "skyfleet_load_file":
            self.held = load_file(args[0])
            self._given = {name: weight_checksum(w).tolist() for name, w in self.held.items()}
            if self._spoiled:
                self.held[self._spoiled] = torch.zeros_like(self.held[self._spoiled])
            return [None]
        sums = {name: weight_checksum(weight).tolist() for name, weight in self.held.items()}
        if self._reports is None:
            return [{"given": self._given, "held": sums}]
        return [{"given": {name: sums[name] for name in filter(self._reports, sums)}, "held": {}}]


class FakeLearner:
    """The part of a learner that a sync uses."""

    policy_version = 3


async def push(worker: Worker) -> VllmEngine:
    module = tiny_policy().decoder.module
    engine = VllmEngine(
        worker, VllmSettings(max_model_len=64, model_dtype="float32"), decode_text=str
    )
    learner: Learner = FakeLearner()  # type: ignore[assignment]
    await VllmSync(lambda: merged_state_dict(module).items()).push(learner, [engine])
    return engine


async def test_every_weight_is_sent_once_by_its_name() -> None:
    worker = Worker()
    assert (await push(worker)).policy_version == 3
    state = tiny_policy().decoder.module.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert state.keys() - worker.held.keys() == {"lm_head.weight"}
    assert all(torch.equal(weight, state[name]) for name, weight in worker.held.items())


async def test_a_worker_with_a_different_weight_stops_the_run() -> None:
    with pytest.raises(
        SentinelError, match=r"holds .*: 1 of 24 .* first model\.embed_tokens\.weight"
    ):
        await push(Worker(spoiled="model.embed_tokens.weight"))


async def test_a_worker_that_does_not_report_every_weight_stops_the_run() -> None:
    with pytest.raises(
        SentinelError, match=r"received weights that differ.*: 24 of 24 .* first model\.embed_"
    ):
        await push(Worker(reports=lambda name: False))
    with pytest.raises(SentinelError, match=r": 1 of 24 tensors, first model\.norm\.weight"):
        await push(Worker(reports=lambda name: name != "model.norm.weight"))
    await push(Worker(reports=lambda name: True))


def test_rounded_weights_are_verified_as_sent_and_as_held() -> None:
    weight = torch.tensor([1.001, 2.0])
    expected = ExpectedChecksums.compute({"w": weight}, ["bfloat16"])
    rounded = {"w": weight_checksum(weight.bfloat16()).tolist()}
    assert expected.find_mismatch({"given": expected.sent, "held": rounded}, "bfloat16") == ""
    assert expected.find_mismatch({"given": rounded, "held": rounded}, "bfloat16").startswith(
        "received"
    )
    assert expected.find_mismatch(
        {"given": expected.sent, "held": expected.sent}, "bfloat16"
    ).startswith("holds")


class ExtensionWorker:
    """vLLM with a worker that has our extension, and a model of its own to load into."""

    def __init__(self) -> None:
        self.module = tiny_policy().decoder.module
        forget_weights(self.module)
        self._worker = WorkerExtension(self.module, 1)
        self.called: list[str] = []

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.called.append("pause")

    async def resume_generation(self) -> None: ...

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.called.append(method)
        return [await asyncio.to_thread(getattr(self._worker, method), *args)]


def open_engine(worker: ExtensionWorker) -> VllmEngine:
    settings = VllmSettings(max_model_len=64, model_dtype="float32")
    return VllmEngine(worker, settings, decode_text=str)


async def test_engines_fetch_deltas_before_they_pause_and_every_weight_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_worker, "_replace", replace_weights)
    worker, module = ExtensionWorker(), tiny_policy().decoder.module
    sync = VllmSync(
        lambda: merged_state_dict(module).items(),
        deltas=lambda dtype: DeltaPublisher(str(tmp_path), dtype=dtype),
    )
    learner: Learner = FakeLearner()  # type: ignore[assignment]
    sizes = []
    for version in (3, 4):
        monkeypatch.setattr(learner, "policy_version", version, raising=False)
        await sync.push(learner, [open_engine(worker)])
        assert sync.report is not None
        sizes.append(sync.report.n_bytes)
        state = worker.module.state_dict()
        assert all(torch.equal(w, state[name]) for name, w in module.state_dict().items())
        with torch.no_grad():
            module.get_parameter("model.norm.weight")[0] += 0.5
    assert worker.called[:4] == [
        "skyfleet_fetch_delta",
        "pause",
        "skyfleet_load_delta",
        "skyfleet_sums",
    ]
    assert sizes[1] < sizes[0] / 20
    with torch.no_grad():
        worker.module.get_parameter("model.norm.weight")[1] += 0.5
    with pytest.raises(SentinelError, match=r"holds weights that differ.*model\.norm\.weight"):
        await sync.verify([open_engine(worker)])


async def test_a_vllm_worker_receives_buckets_as_a_rank_of_a_transfer_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_worker, "_replace", replace_weights)
    worker, module = ExtensionWorker(), tiny_policy().decoder.module
    engine = open_engine(worker)
    sender = WeightSender("127.0.0.1:0", world_size=2, backend="gloo", bucket_bytes=30_000)
    group = {"address": sender.address, "world_size": 2, "backend": "gloo", "first_rank": 1}
    await engine.collective_rpc("skyfleet_join_group", group)
    weights = merged_state_dict(module)
    report, _ = await asyncio.gather(
        asyncio.to_thread(sender.send, weights.items(), version=5),
        engine.update_weights("skyfleet_receive", "", policy_version=5),
    )
    state = worker.module.state_dict()
    assert report.n_transfers > 3
    assert all(torch.equal(weight, state[name]) for name, weight in weights.items())
    expected = ExpectedChecksums.compute(
        {name: weights[name] for name in weights if name != "lm_head.weight"}, ["float32"]
    )
    (reported,) = await engine.collective_rpc("skyfleet_sums", expected.shapes)
    assert expected.find_mismatch(reported, "float32") == ""
