"""Receivers of weights in processes of their own, which are told case by case what to do."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, nn

from skyfleet.config.policy import Lora
from skyfleet.errors import SkyfleetError
from skyfleet.models.lora import add_adapters, merged_state_dict
from skyfleet.models.weights import weight_checksum
from skyfleet.weight_transfer.receiver import WeightReceiver
from skyfleet.weight_transfer.targets import AdapterWeights, ModuleWeights

LORA = Lora(rank=2, alpha=4)
START_SECONDS = 120


class SmallModel(nn.Module):
    """Named like a Hugging Face decoder, with a tied head; it needs no import of transformers."""

    def __init__(
        self,
        *,
        seed: int = 9,
        dtype: torch.dtype = torch.float32,
        vocab_size: int = 64,
        is_tied: bool = True,
    ) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab_size, 32)
        self.model.layers = nn.ModuleList(
            nn.ModuleDict({"up_proj": nn.Linear(32, 48), "down_proj": nn.Linear(48, 32)})
            for _ in range(4)
        )
        self.model.norm = nn.LayerNorm(32, bias=False)
        self.lm_head = nn.Linear(32, vocab_size, bias=False)
        if is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                weight.normal_(generator=drawn)
        self.to(dtype)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, token_ids: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverCase:
    """What a receiver does: it opens a group if it gets an address, then receives once."""

    address: str = ""
    rank: int = 1
    world_size: int = 3
    backend: Any = "gloo"
    timeout_seconds: float = 60.0
    model: dict[str, Any] = field(default_factory=dict)
    adapters: bool = False
    extra: str = ""
    """A weight that only this receiver's model has."""
    without: str = ""
    """A weight that this receiver's model lacks."""
    keeps_model: bool = False


def build_module(case: ReceiverCase) -> nn.Module:
    module = SmallModel(**case.model)
    if case.adapters:
        add_adapters(module, LORA, seed=5)
    if case.extra:
        module.register_parameter(case.extra, nn.Parameter(torch.zeros(3)))
    if case.without:
        parent, _, leaf = case.without.rpartition(".")
        delattr(module.get_submodule(parent), leaf)
    return module


def sums(module: nn.Module) -> dict[str, list[int]]:
    return {
        name: weight_checksum(weight).tolist() for name, weight in merged_state_dict(module).items()
    }


def serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    receiver, module = None, None
    pipe.send("ready")
    while (case := pipe.recv()) is not None:
        try:
            if case.address:
                receiver = WeightReceiver(
                    case.address,
                    rank=case.rank,
                    world_size=case.world_size,
                    backend=case.backend,
                    timeout_seconds=case.timeout_seconds,
                )
            if not (case.keeps_model and module is not None):
                module = build_module(case)
            assert receiver is not None
            target = AdapterWeights(module) if case.adapters else ModuleWeights(module)
            receiver.receive(target)
            pipe.send(sums(module))
        except SkyfleetError as error:
            pipe.send(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    processes: list[BaseProcess]
    pipes: list[Connection]

    def start(self, *cases: ReceiverCase) -> None:
        for pipe, case in zip(self.pipes, cases, strict=False):
            pipe.send(case)

    def answers(self, n: int) -> list[Any]:
        found = []
        for pipe in self.pipes[:n]:
            assert pipe.poll(START_SECONDS), "a receiver hangs"
            found.append(pipe.recv())
        return found

    def kill(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].join()

    def stop(self, index: int) -> None:
        """It hangs: it neither answers nor ends."""
        self._signal(index, signal.SIGSTOP)

    def resume(self, index: int) -> None:
        self._signal(index, signal.SIGCONT)

    def _signal(self, index: int, number: int) -> None:
        pid = self.processes[index].pid
        assert pid is not None
        os.kill(pid, number)


@contextmanager
def open_receivers(n: int) -> Iterator[Receivers]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once for all of them
    pairs = [context.Pipe() for _ in range(n)]
    processes: list[BaseProcess] = [
        context.Process(target=serve, args=(theirs,), daemon=True) for _, theirs in pairs
    ]
    for process in processes:
        process.start()
    receivers = Receivers(processes=processes, pipes=[ours for ours, _ in pairs])
    try:
        assert receivers.answers(n) == ["ready"] * n
        yield receivers
    finally:
        for process in processes:
            process.kill()
            process.join()
