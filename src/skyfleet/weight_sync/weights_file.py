"""A temporary safetensors file that carries weights to engines, and removal of stale ones."""

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
    """Write the file to `folder`; without one, to shared memory or to the temporary folder."""
    n_bytes = sum(weight.nbytes for weight in weights.values())
    parent = folder or _find_shared_memory(n_bytes)
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(TemporaryDirectory(prefix=_PREFIX, dir=parent))
            stack.enter_context(_locked(directory))
            path = Path(directory) / _FILE
            await asyncio.to_thread(_write, weights, path, world_readable=folder is not None)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"generator.weight_sync_dir={folder!r}: {n_bytes} bytes of weights cannot be written "
                f"to {parent or 'the temporary folder'} ({error}); set it to a folder with enough "
                "space that the engines see too"
            ) from error
        yield path


def remove_stale_files() -> None:
    """Remove files in shared memory that a killed trainer left behind."""
    for stale in SHARED_MEMORY.glob(f"{_PREFIX}*/{_FILE}"):
        with suppress(OSError), _locked(stale.parent):
            rmtree(stale.parent)


def _find_shared_memory(n_bytes: int) -> str | None:
    """None if it is too small, as in many containers."""
    fits = SHARED_MEMORY.is_dir() and disk_usage(SHARED_MEMORY).free > n_bytes
    return str(SHARED_MEMORY) if fits else None


def _write(weights: dict[str, Tensor], path: Path, *, world_readable: bool) -> None:
    """`world_readable` is for servers that run as another user, such as in a container."""
    save_file(weights, path)
    if world_readable:
        path.chmod(0o644)
        path.parent.chmod(0o755)


@contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """Lock a folder.

    The kernel unlocks it when the process ends. OSError if another process has it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
