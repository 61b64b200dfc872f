"""Jails for tests: small states to judge, verifiers in one line, and a look at what is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from textwrap import dedent, indent

import pytest

from skyfleet.envs.verifiers.jail import Jail
from skyfleet.tasks.task import Grade

BWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
NO_BWRAP = "/not/installed/bwrap"
KINDS = [pytest.param("bwrap", marks=BWRAP), pytest.param(NO_BWRAP, id="without-bwrap")]


def image_of(*pets: str) -> bytes:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("create table pets (id integer primary key, name text)")
        connection.executemany("insert into pets (name) values (?)", [(name,) for name in pets])
        return connection.serialize()


SEED, CURRENT = image_of("rex"), image_of("rex", "tom")

GOOD = "def verify(env): return 1"
SLOW = "import time\ndef verify(env): time.sleep(60)"


def verifier(body: str) -> str:
    return "def verify(env, final_answer=None):\n" + indent(dedent(body), "    ")


async def verify(jail: Jail, code: str, timeout_seconds: float = 20) -> Grade:
    return await jail.verify(code, SEED, CURRENT, None, timeout_seconds=timeout_seconds)


async def at_work(jail: Jail) -> asyncio.Task[Grade]:
    """A verification that has begun and will not end by itself."""
    await verify(jail, GOOD)
    n_processes = len(processes_of(jail.pids))
    task = asyncio.create_task(verify(jail, SLOW))
    for _ in range(500):
        await asyncio.sleep(0.01)
        if len(processes_of(jail.pids)) > n_processes:
            return task
    raise TimeoutError("no worker has begun within five seconds")


def processes_of(pids: Iterable[int]) -> list[int]:
    """These and all that they started."""
    found = list(pids)
    for pid in found:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        found += [int(child) for child in children.read_text().split()] if children.exists() else []
    return found


async def gone(pids: Iterable[int]) -> bool:
    """Whether all are gone within five seconds; one that only waits to be reaped is."""
    left = list(pids)
    for _ in range(500):
        left = [pid for pid in left if _running(pid)]
        if not left:
            return True
        await asyncio.sleep(0.01)
    return False


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))
