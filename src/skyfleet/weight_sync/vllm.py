"""VllmSync: the learner's weights into running vLLM engines, read back to be sure.

On the learner's own GPU vLLM reads them where they lie; elsewhere, on CPUs and as a server, from a
file.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from skyfleet.engines.engine import Engine
from skyfleet.engines.vllm_worker import device_name
from skyfleet.errors import ConfigError, SentinelError
from skyfleet.learner.learner import Learner
from skyfleet.models.bit_sums import bit_sums

SHARED_MEMORY = Path("/dev/shm")


@runtime_checkable
class TakesWeights(Protocol):
    """An engine that weights can be handed to while it runs."""

    name: str
    model_dtype: str
    reads_memory: bool

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

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        """SentinelError where an engine then holds others than were sent."""
        weights, version = _once_each(self._weights()), learner.policy_version
        takers = [_taker(engine) for engine in engines]
        near = [taker for taker in takers if await _shares_gpu(taker, weights)]
        for taker in near:
            handles = await asyncio.to_thread(_handles, weights)
            await taker.load("skyfleet_load_handles", handles, policy_version=version)
        if far := [taker for taker in takers if taker not in near]:
            with _scratch(self._folder, sum(w.nbytes for w in weights.values())) as scratch:
                path = Path(scratch) / "weights.safetensors"
                await asyncio.to_thread(save_file, weights, path)
                for taker in far:
                    await taker.load("skyfleet_load_file", str(path), policy_version=version)
        for taker in takers:
            await _check(weights, taker)
        return version


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


def _scratch(folder: str | None, n_bytes: int) -> TemporaryDirectory[str]:
    """By default in memory where there is room; a container often gives it little."""
    roomy = SHARED_MEMORY.is_dir() and disk_usage(SHARED_MEMORY).free > n_bytes
    place = folder or (str(SHARED_MEMORY) if roomy else None)
    try:
        return TemporaryDirectory(prefix="skyfleet-", dir=place)
    except OSError as error:
        raise ConfigError(
            f"generator.weight_sync_dir={folder!r}: nothing can be written to "
            f"{place or 'the temporary folder'} ({error.strerror}); name a folder that exists, and "
            "that the engines see too"
        ) from error


async def _check(weights: dict[str, Tensor], taker: TakesWeights) -> None:
    shapes = {name: list(weight.shape) for name, weight in weights.items()}
    theirs, *_ = await taker.ask("skyfleet_sums", shapes)
    dtype = getattr(torch, taker.model_dtype)
    odd = [
        name for name, sums in theirs.items() if bit_sums(weights[name].to(dtype)).tolist() != sums
    ]
    if odd:
        raise SentinelError(
            f"after the sync {taker.name} has other weights than the learner: {len(odd)} of the "
            f"{len(theirs)} tensors that can be read back, first {odd[0]}"
        )
