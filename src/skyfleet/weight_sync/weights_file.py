"""Scratch: the folder that weights travel in; what a killed trainer left of one is removed."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from shutil import disk_usage, rmtree
from tempfile import TemporaryDirectory

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from skyfleet.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _FILE = "skyfleet-", "weights.safetensors"


@asynccontextmanager
async def weights_file(weights: dict[str, Tensor], folder: str | None) -> AsyncIterator[Path]:
    """In `folder`; without one in memory, or in the temporary folder."""
    n_bytes = sum(weight.nbytes for weight in weights.values())
    place = folder or _memory(n_bytes)
    with ExitStack() as kept:
        try:
            scratch = kept.enter_context(TemporaryDirectory(prefix=_PREFIX, dir=place))
            kept.enter_context(_locked(scratch))
            path = Path(scratch) / _FILE
            await asyncio.to_thread(_write, weights, path, for_all=folder is not None)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"generator.weight_sync_dir={folder!r}: {n_bytes} bytes of weights cannot be written "
                f"to {place or 'the temporary folder'} ({error}); name a folder with room for them "
                "that the engines see too"
            ) from error
        yield path


def remove_left() -> None:
    """Shared memory stays taken when a trainer is killed while weights travel."""
    for left in SHARED_MEMORY.glob(f"{_PREFIX}*/{_FILE}"):
        with suppress(OSError), _locked(left.parent):
            rmtree(left.parent)


def _memory(n_bytes: int) -> str | None:
    """None where it has no room: a container often gives it little."""
    roomy = SHARED_MEMORY.is_dir() and disk_usage(SHARED_MEMORY).free > n_bytes
    return str(SHARED_MEMORY) if roomy else None


def _write(weights: dict[str, Tensor], path: Path, *, for_all: bool) -> None:
    """`for_all`: a server's container has users of its own."""
    save_file(weights, path)
    if for_all:
        path.chmod(0o644)
        path.parent.chmod(0o755)


@contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """The kernel opens it when the process ends. OSError where another has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
