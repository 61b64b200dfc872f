"""VllmSync: the learner's weights into running vLLM engines, read back to be sure.

On the learner's own GPU vLLM reads them where they lie; elsewhere, on CPUs and as a server, from a
file.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import tell_living
from skyfleet.engines.vllm_worker import device_name
from skyfleet.errors import ConfigError, SentinelError
from skyfleet.learner.learner import Learner
from skyfleet.models.weights import bit_sums
from skyfleet.weight_sync.weights_file import remove_left, weights_file

Sums = Mapping[str, list[int]]
"""A tensor's `bit_sums` by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    shapes: Mapping[str, list[int]]
    sent: Sums
    held: Mapping[str, Sums]
    """As each precision that an engine may have rounds them."""

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], model_dtypes: Iterable[str]) -> Self:
        sent = {name: bit_sums(weight).tolist() for name, weight in weights.items()}
        return cls(
            shapes={name: list(weight.shape) for name, weight in weights.items()},
            sent=sent,
            held={
                named: {
                    name: sent[name]
                    if weight.dtype is dtype
                    else bit_sums(weight.to(dtype)).tolist()
                    for name, weight in weights.items()
                }
                for named in model_dtypes
                for dtype in (getattr(torch, named),)
            },
        )

    def fault(self, told: Mapping[str, Sums], model_dtype: str) -> str:
        """What is wrong with `WeightUpdateExtension.skyfleet_sums`' answer, if anything is.

        Every tensor that was sent must have been given to vLLM, and what can be read back must be it.
        """
        given, held, read = told["given"], told["held"], self.held[model_dtype]
        odd = {
            "was given": [name for name, sums in self.sent.items() if given.get(name) != sums],
            "holds": [name for name, sums in held.items() if read.get(name) != sums],
        }
        for what, names in odd.items():
            if names:
                return (
                    f"{what} other weights than the learner's: {len(names)} of {len(self.sent)} "
                    f"tensors, first {names[0]}"
                )
        return ""


@runtime_checkable
class TakesWeights(Protocol):
    """An engine that weights can be handed to while it runs."""

    name: str
    model_dtype: str
    reads_memory: bool
    way_out: str

    async def ask(self, method: str, *arguments: Any) -> list[Any]: ...

    async def load(self, method: str, argument: str | bytes, *, policy_version: int) -> None: ...


class VllmSync:
    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        folder: str | None = None,
    ) -> None:
        """`weights` gives the whole model by Hugging Face's names, adapters merged in.

        `folder` is one that the engines see too; None is for engines on this machine.
        """
        self._weights, self._folder = weights, folder
        self._proof: Proof | None = None
        remove_left()

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        """SentinelError where an engine then holds others than were sent."""
        weights, version = _once_each(self._weights()), learner.policy_version
        takers = [_taker(engine) for engine in engines]
        near: list[TakesWeights] = []
        far: list[TakesWeights] = []

        async def sort(taker: TakesWeights) -> None:
            (near if await _shares_gpu(taker, weights) else far).append(taker)

        async def point(taker: TakesWeights) -> None:
            handles = await asyncio.to_thread(_handles, weights)
            await taker.load("skyfleet_load_handles", handles, policy_version=version)

        async def check(taker: TakesWeights) -> None:
            if fault := await _fault(proof, taker):
                raise SentinelError(f"after the sync {taker.name} {fault}; {taker.way_out}")

        await tell_living(takers, sort)
        if near:
            await tell_living(near, point)
        if far:
            async with weights_file(weights, self._folder) as path:
                await tell_living(
                    far,
                    lambda taker: taker.load(
                        "skyfleet_load_file", str(path), policy_version=version
                    ),
                )
        proof = Proof.of(weights, {taker.model_dtype for taker in takers})
        self._proof = proof
        await tell_living(takers, check)
        return version

    async def confirm(self, engines: Sequence[Engine]) -> None:
        """Of one that has died nothing more can be read: it was proven when its weights came."""
        proof = self._proof
        if proof is None:
            return

        async def check(taker: TakesWeights) -> None:
            if fault := await _fault(proof, taker):
                raise SentinelError(
                    f"{taker.name} {fault}: it was started again since the last sync, or another "
                    "run gave it weights, and what it has said since is not the policy's; leave it "
                    "to this run, and the same command goes on from the newest checkpoint"
                )

        await tell_living([_taker(engine) for engine in engines], check)


def _taker(engine: Engine) -> TakesWeights:
    if not isinstance(engine, TakesWeights):
        raise ConfigError(f"VllmSync has no way into a {type(engine).__name__}")
    return engine


def _once_each(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """A tied head is the embedding under another name; no file holds it twice, and vLLM ties it."""
    seen: dict[int, tuple[str, Tensor]] = {}
    for name, weight in named:
        seen.setdefault(weight.data_ptr(), (name, weight.detach().contiguous()))
    return dict(seen.values())


async def _shares_gpu(taker: TakesWeights, weights: dict[str, Tensor]) -> bool:
    here = {device_name(weight.device) for weight in weights.values()}
    return (
        taker.reads_memory and here != {"cpu"} and here == set(await taker.ask("skyfleet_device"))
    )


def _handles(weights: dict[str, Tensor]) -> bytes:
    """Where the weights lie in GPU memory, for another process; they must outlive its reading."""
    torch.cuda.synchronize(next(iter(weights.values())).device)
    handles = [
        (name, list(reduce_tensor(weight)[1]))  # type: ignore[no-untyped-call]
        for name, weight in weights.items()
    ]
    return pickle.dumps(handles)


async def _fault(proof: Proof, taker: TakesWeights) -> str:
    (told,) = await taker.ask("skyfleet_sums", proof.shapes)
    return proof.fault(told, taker.model_dtype)
