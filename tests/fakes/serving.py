"""Serving: any ASGI app on a free port of this machine, and nothing left of it afterwards."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from skyfleet.envs.agent_env import LOCAL_ACCESS, LoopbackServer
from skyfleet.serving.access import AccessPolicy


@asynccontextmanager
async def serving(app: Any, access: AccessPolicy = LOCAL_ACCESS) -> AsyncIterator[str]:
    """The base URL, without a slash at its end. Leaving cuts whoever is still connected."""
    server = LoopbackServer(app, access)
    try:
        yield server.url
    finally:
        await server.stop()


@asynccontextmanager
async def nothing_left(within_seconds: float = 3) -> AsyncIterator[None]:
    """Fails unless every task, thread, file, socket and process begun in here soon ends."""
    before = _held()
    yield
    for _ in range(int(within_seconds / 0.02)):
        if not (left := _held() - before):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"left behind: {sorted(left)}")


def _held() -> Counter[str]:
    tasks = [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    threads = [repr(thread) for thread in threading.enumerate()]
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    files = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder being listed was one of them
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    return Counter([*tasks, *threads, *files, *(f"process {pid}" for pid in children)])
