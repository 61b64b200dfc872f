"""VllmSync: push the learner's weights into running vLLM engines, and verify them by checksums.

On the learner's own GPU, vLLM reads the weights in place (CUDA IPC). On other devices, on CPUs and
on servers, it reads them from a file, or fetches compressed deltas from a folder or bucket.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import broadcast
from skyfleet.engines.vllm_worker import device_name
from skyfleet.errors import ConfigError, SentinelError
from skyfleet.learner.learner import Learner
from skyfleet.models.weights import weight_checksum
from skyfleet.weight_sync.weights_file import remove_stale_files, weights_file
from skyfleet.weight_transfer.buckets import TransferReport
from skyfleet.weight_transfer.delta_publisher import DeltaPublisher

OpenPublisher = Callable[[torch.dtype | None], DeltaPublisher]
"""Opens a publisher of weights in a dtype; None keeps the learner's."""
Checksums = Mapping[str, list[int]]
"""Checksums by tensor name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedChecksums:
    """Checksums of the weights that were sent, to compare with those that a vLLM worker reports."""

    shapes: Mapping[str, list[int]]
    sent: Checksums
    held: Mapping[str, Checksums]
    """Checksums after rounding, by the dtype of an engine."""

    @classmethod
    def compute(
        cls,
        weights: Mapping[str, Tensor],
        model_dtypes: Iterable[str],
        *,
        sent_dtype: torch.dtype | None = None,
    ) -> Self:
        """`sent_dtype` is what weights are rounded to before they are sent."""
        sent = {
            name: weight_checksum(weight.to(sent_dtype or weight.dtype)).tolist()
            for name, weight in weights.items()
        }
        return cls(
            shapes={name: list(weight.shape) for name, weight in weights.items()},
            sent=sent,
            held={
                dtype_name: {
                    name: sent[name]
                    if (sent_dtype or weight.dtype) is dtype
                    else weight_checksum(weight.to(dtype)).tolist()
                    for name, weight in weights.items()
                }
                for dtype_name in model_dtypes
                for dtype in (getattr(torch, dtype_name),)
            },
        )

    def find_mismatch(self, reported: Mapping[str, Checksums], model_dtype: str) -> str:
        """Describe the first mismatch in the result of `skyfleet_sums`; empty if there is none.

        vLLM must have received every tensor that was sent, and hold it wherever it can be read
        back.
        """
        given, held, expected = reported["given"], reported["held"], self.held[model_dtype]
        mismatches = {
            "received": [name for name, sums in self.sent.items() if given.get(name) != sums],
            "holds": [name for name, sums in held.items() if expected.get(name) != sums],
        }
        for verb, names in mismatches.items():
            if names:
                return (
                    f"{verb} weights that differ from the learner's: {len(names)} of "
                    f"{len(self.sent)} tensors, first {names[0]}"
                )
        return ""


@runtime_checkable
class UpdatableEngine(Protocol):
    """An engine whose weights can be replaced while it runs."""

    name: str
    model_dtype: str
    supports_cuda_ipc: bool
    remedy: str

    async def collective_rpc(self, method: str, *arguments: Any) -> list[Any]: ...

    async def update_weights(
        self, method: str, argument: str | bytes, *, policy_version: int
    ) -> None: ...


class VllmSync:
    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        folder: str | None = None,
        deltas: OpenPublisher | None = None,
    ) -> None:
        """`weights` returns the whole model by Hugging Face's names, with adapters merged.

        `folder` is a folder that the engines see too; None is for engines on this machine. With
        `deltas`, every engine gets the weights as compressed deltas instead.
        """
        self._weights, self._folder, self._open_publisher = weights, folder, deltas
        self._publisher: DeltaPublisher | None = None
        self._expected: ExpectedChecksums | None = None
        self.report: TransferReport | None = None
        """Of the last push."""
        remove_stale_files()

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        """SentinelError if an engine then holds other weights than were sent."""
        start = perf_counter()
        weights, version = _without_duplicates(self._weights()), learner.policy_version
        updatable = [_as_updatable(engine) for engine in engines]
        dtypes = {engine.model_dtype for engine in updatable}
        sent_dtype = None
        if self._open_publisher is not None:
            sent_dtype = getattr(torch, min(dtypes)) if len(dtypes) == 1 else None
            n_bytes = await self._push_delta(weights, updatable, version, sent_dtype)
        else:
            n_bytes = await self._push_whole(weights, updatable, version)

        async def check(engine: UpdatableEngine) -> None:
            if mismatch := await _find_mismatch(expected, engine):
                raise SentinelError(f"after the sync, {engine.name} {mismatch}; {engine.remedy}")

        expected = ExpectedChecksums.compute(weights, dtypes, sent_dtype=sent_dtype)
        self._expected = expected
        await broadcast(updatable, check)
        self.report = TransferReport(n_bytes=n_bytes, seconds=perf_counter() - start)
        return version

    async def _push_whole(
        self, weights: dict[str, Tensor], engines: Sequence[UpdatableEngine], version: int
    ) -> int:
        """By CUDA IPC or by file; returns the bytes."""
        by_ipc: list[UpdatableEngine] = []
        by_file: list[UpdatableEngine] = []

        async def choose_transport(engine: UpdatableEngine) -> None:
            (by_ipc if await _shares_gpu(engine, weights) else by_file).append(engine)

        async def send_handles(engine: UpdatableEngine) -> None:
            handles = await asyncio.to_thread(_ipc_handles, weights)
            await engine.update_weights("skyfleet_load_handles", handles, policy_version=version)

        await broadcast(engines, choose_transport)
        if by_ipc:
            await broadcast(by_ipc, send_handles)
        if by_file:
            async with weights_file(weights, self._folder) as path:
                await broadcast(
                    by_file,
                    lambda engine: engine.update_weights(
                        "skyfleet_load_file", str(path), policy_version=version
                    ),
                )
        return sum(weight.nbytes for weight in weights.values())

    async def _push_delta(
        self,
        weights: dict[str, Tensor],
        engines: Sequence[UpdatableEngine],
        version: int,
        dtype: torch.dtype | None,
    ) -> int:
        """Engines fetch while they go on, and pause only to load; returns the bytes published."""
        if self._publisher is None:
            assert self._open_publisher is not None
            self._publisher = self._open_publisher(dtype)
        publisher = self._publisher
        report = await asyncio.to_thread(publisher.publish, weights.items(), version=version)
        await broadcast(
            engines,
            lambda engine: engine.collective_rpc(
                "skyfleet_fetch_delta", publisher.sync_dir, version
            ),
        )
        await broadcast(
            engines,
            lambda engine: engine.update_weights("skyfleet_load_delta", "", policy_version=version),
        )
        return report.n_bytes

    async def verify(self, engines: Sequence[Engine]) -> None:
        """Check healthy engines again.

        A dead one was last verified when its weights were pushed.
        """
        expected = self._expected
        if expected is None:
            return

        async def check(engine: UpdatableEngine) -> None:
            if mismatch := await _find_mismatch(expected, engine):
                raise SentinelError(
                    f"{engine.name} {mismatch}: since the last sync it was restarted, or another run "
                    "pushed weights to it, so its samples since then are not from this policy; use it "
                    "for this run only, then run the same command to resume from the latest checkpoint"
                )

        await broadcast([_as_updatable(engine) for engine in engines], check)


def _as_updatable(engine: Engine) -> UpdatableEngine:
    if not isinstance(engine, UpdatableEngine):
        raise ConfigError(f"VllmSync cannot update the weights of a {type(engine).__name__}")
    return engine


def _without_duplicates(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Drop a tied head, which is the embedding under another name: vLLM ties it itself."""
    seen: dict[int, tuple[str, Tensor]] = {}
    for name, weight in named:
        seen.setdefault(weight.data_ptr(), (name, weight.detach().contiguous()))
    return dict(seen.values())


async def _shares_gpu(engine: UpdatableEngine, weights: dict[str, Tensor]) -> bool:
    here = {device_name(weight.device) for weight in weights.values()}
    if not engine.supports_cuda_ipc or here == {"cpu"}:
        return False
    return here == set(await engine.collective_rpc("skyfleet_device"))


def _ipc_handles(weights: dict[str, Tensor]) -> bytes:
    """CUDA IPC handles of the weights, which must stay allocated until the other process has read
    them."""
    torch.cuda.synchronize(next(iter(weights.values())).device)
    handles = [
        (name, list(reduce_tensor(weight)[1]))  # type: ignore[no-untyped-call]
        for name, weight in weights.items()
    ]
    return pickle.dumps(handles)


async def _find_mismatch(expected: ExpectedChecksums, engine: UpdatableEngine) -> str:
    (reported,) = await engine.collective_rpc("skyfleet_sums", expected.shapes)
    return expected.find_mismatch(reported, engine.model_dtype)
