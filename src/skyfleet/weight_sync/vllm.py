"""VllmSync: the learner's weights into running vLLM engines, read back to be sure.

On the learner's own GPU vLLM reads them where they lie; elsewhere, and on CPUs, from a file in
shared memory.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from skyfleet.engines.engine import Engine
from skyfleet.engines.vllm_engine import VllmEngine
from skyfleet.engines.vllm_worker import device_name
from skyfleet.errors import ConfigError, SentinelError
from skyfleet.learner.learner import Learner
from skyfleet.models.bit_sums import bit_sums

SHARED_MEMORY = Path("/dev/shm")


class VllmSync:
    def __init__(self, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """`weights` gives the whole model by Hugging Face's names, adapters merged in."""
        self._weights = weights

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        """SentinelError where an engine then holds others than were sent."""
        weights = _once_each(self._weights())
        for engine in engines:
            if not isinstance(engine, VllmEngine):
                raise ConfigError(f"VllmSync has no way into a {type(engine).__name__}")
            await _send(weights, engine, learner.policy_version)
            await _check(weights, engine)
        return learner.policy_version


def _once_each(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """A tied head is the embedding under another name; no file holds it twice, and vLLM ties it."""
    seen: dict[int, tuple[str, Tensor]] = {}
    for name, weight in named:
        seen.setdefault(weight.data_ptr(), (name, weight.detach().contiguous()))
    return dict(seen.values())


async def _send(weights: dict[str, Tensor], engine: VllmEngine, version: int) -> None:
    here = {device_name(weight.device) for weight in weights.values()}
    there = set(await engine.ask("skyfleet_device"))
    if here == there != {"cpu"}:
        handles = await asyncio.to_thread(_handles, weights)
        await engine.load("skyfleet_load_handles", handles, policy_version=version)
        return
    with _folder(sum(weight.nbytes for weight in weights.values())) as folder:
        path = Path(folder) / "weights.safetensors"
        await asyncio.to_thread(save_file, weights, path)
        await engine.load("skyfleet_load_file", str(path), policy_version=version)


def _handles(weights: dict[str, Tensor]) -> bytes:
    """Where the weights lie in GPU memory, for another process; they must outlive its reading."""
    torch.cuda.synchronize(next(iter(weights.values())).device)
    handles = [
        (name, list(reduce_tensor(weight)[1]))  # type: ignore[no-untyped-call]
        for name, weight in weights.items()
    ]
    return pickle.dumps(handles)


def _folder(n_bytes: int) -> TemporaryDirectory[str]:
    """In memory where there is room; a container often gives it little."""
    roomy = SHARED_MEMORY.is_dir() and disk_usage(SHARED_MEMORY).free > n_bytes
    return TemporaryDirectory(prefix="skyfleet-", dir=SHARED_MEMORY if roomy else None)


async def _check(weights: dict[str, Tensor], engine: VllmEngine) -> None:
    shapes = {name: list(weight.shape) for name, weight in weights.items()}
    theirs, *_ = await engine.ask("skyfleet_sums", shapes)
    dtype = getattr(torch, engine.settings.model_dtype)
    odd = [
        name for name, sums in theirs.items() if bit_sums(weights[name].to(dtype)).tolist() != sums
    ]
    if odd:
        raise SentinelError(
            f"after the sync vLLM has other weights than the learner: {len(odd)} of the "
            f"{len(theirs)} tensors that can be read back, first {odd[0]}"
        )
