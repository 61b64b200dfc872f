"""What a sync hands to vLLM, where its worker is one of ours that reads the same file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.tiny_speaker import tiny_speaker
from torch import Tensor

from skyfleet.engines.vllm_controller import VllmSettings
from skyfleet.engines.vllm_engine import VllmEngine
from skyfleet.errors import SentinelError
from skyfleet.learner.learner import Learner
from skyfleet.models.lora import merged_state
from skyfleet.models.weights import bit_sums
from skyfleet.weight_sync.vllm import Proof, VllmSync


class Worker:
    """In place of vLLM: holds what it reads, `spoiled` where it should have read another.

    It can tell of those that it was given as `proven` says, and of none that it holds.
    """

    def __init__(self, *, spoiled: str = "", proven: Callable[[str], bool] | None = None) -> None:
        self.held: dict[str, Tensor] = {}
        self._spoiled, self._proven = spoiled, proven

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "skyfleet_device":
            return ["cpu"]
        if method == "skyfleet_load_file":
            self.held = load_file(args[0])
            self._given = {name: bit_sums(w).tolist() for name, w in self.held.items()}
            if self._spoiled:
                self.held[self._spoiled] = torch.zeros_like(self.held[self._spoiled])
            return [None]
        sums = {name: bit_sums(weight).tolist() for name, weight in self.held.items()}
        if self._proven is None:
            return [{"given": self._given, "held": sums}]
        return [{"given": {name: sums[name] for name in filter(self._proven, sums)}, "held": {}}]


class Taught:
    """A learner as far as a sync asks."""

    policy_version = 3


async def push(worker: Worker) -> VllmEngine:
    module = tiny_speaker().decoder.module
    engine = VllmEngine(
        worker, VllmSettings(max_model_len=64, model_dtype="float32"), decode_text=str
    )
    taught: Learner = Taught()  # type: ignore[assignment]
    await VllmSync(lambda: merged_state(module).items()).push(taught, [engine])
    return engine


async def test_every_weight_is_sent_once_under_its_own_name() -> None:
    worker = Worker()
    assert (await push(worker)).policy_version == 3
    state = tiny_speaker().decoder.module.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert state.keys() - worker.held.keys() == {"lm_head.weight"}
    assert all(torch.equal(weight, state[name]) for name, weight in worker.held.items())


async def test_a_worker_that_holds_another_weight_stops_the_run() -> None:
    with pytest.raises(
        SentinelError, match=r"holds .*: 1 of 24 .* first model\.embed_tokens\.weight"
    ):
        await push(Worker(spoiled="model.embed_tokens.weight"))


async def test_a_worker_that_proves_nothing_or_not_all_stops_the_run() -> None:
    with pytest.raises(SentinelError, match=r"was given other .*: 24 of 24 .* first model\.embed_"):
        await push(Worker(proven=lambda name: False))
    with pytest.raises(SentinelError, match=r": 1 of 24 tensors, first model\.norm\.weight"):
        await push(Worker(proven=lambda name: name != "model.norm.weight"))
    await push(Worker(proven=lambda name: True))


def test_what_an_engine_rounds_is_proven_as_it_came_and_as_it_is_held() -> None:
    weight = torch.tensor([1.001, 2.0])
    proof = Proof.of({"w": weight}, ["bfloat16"])
    rounded = {"w": bit_sums(weight.bfloat16()).tolist()}
    assert proof.fault({"given": proof.sent, "held": rounded}, "bfloat16") == ""
    assert proof.fault({"given": rounded, "held": rounded}, "bfloat16").startswith("was given")
    assert proof.fault({"given": proof.sent, "held": proof.sent}, "bfloat16").startswith("holds")
