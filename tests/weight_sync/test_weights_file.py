"""The folder that weights travel in: who may read it, what is said when it is full, and what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from stat import S_IMODE

import pytest
import torch

from skyfleet.errors import ConfigError
from skyfleet.weight_sync import weights_file as scratch
from skyfleet.weight_sync.weights_file import remove_left, weights_file

WEIGHTS = {"a": torch.zeros(100_000)}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path)
    return tmp_path


def modes(path: Path) -> tuple[int, int]:
    return S_IMODE(path.parent.stat().st_mode), S_IMODE(path.stat().st_mode)


async def test_in_a_folder_that_is_named_every_user_may_read(tmp_path: Path) -> None:
    named = tmp_path / "named"
    named.mkdir()
    async with weights_file(WEIGHTS, str(named)) as path:
        assert modes(path) == (0o755, 0o644)
    async with weights_file(WEIGHTS, None) as path:
        assert path.parent.parent == tmp_path
        assert modes(path)[0] == 0o700
    assert os.listdir(tmp_path) == ["named"]
    assert os.listdir(named) == []


async def test_a_full_folder_is_named_with_the_bytes_that_it_lacks(tmp_path: Path) -> None:
    before, handler = getrlimit(RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    setrlimit(RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(
            ConfigError, match=r"weight_sync_dir='\S+': 400000 bytes of weights cannot be written"
        ):
            async with weights_file(WEIGHTS, str(tmp_path)):
                pass
    finally:
        setrlimit(RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == []


async def test_what_a_killed_trainer_left_is_removed_and_what_travels_is_not(memory: Path) -> None:
    (memory / "skyfleet-other").mkdir()
    killed = (
        "import asyncio, os, sys; from pathlib import Path; import torch\n"
        "from skyfleet.weight_sync import scratch\n"
        "scratch.SHARED_MEMORY = Path(sys.argv[1])\n"
        "async def main():\n"
        "    async with scratch.weights_file({'a': torch.zeros(4)}, None): os._exit(9)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", killed, str(memory))
    assert await process.wait() == 9
    async with weights_file(WEIGHTS, None) as path:
        assert len(os.listdir(memory)) == 3
        remove_left()
        assert {*os.listdir(memory)} == {path.parent.name, "skyfleet-other"}
