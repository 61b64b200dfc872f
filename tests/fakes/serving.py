"""Serving: any ASGI app on a free port of this machine, and nothing left of it afterwards."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from skyfleet.chat.tokenizer import encode
from skyfleet.config.root import RunConfig
from skyfleet.envs.agent_gateway import LOCAL_ACCESS, LoopbackServer
from skyfleet.serving.access import AccessPolicy
from skyfleet.serving.server import serve_app
from skyfleet.trainer.policy_client import open_inference_client


@asynccontextmanager
async def serving(app: Any, access: AccessPolicy = LOCAL_ACCESS) -> AsyncIterator[str]:
    """The base URL, without a slash at its end. Leaving cuts whoever is still connected."""
    server = LoopbackServer(app, access)
    try:
        yield server.url
    finally:
        await server.stop()


@asynccontextmanager
async def policy_app(
    config: RunConfig, folder: Path, name: str, api_key: str | None
) -> AsyncIterator[Any]:
    """What `skyfleet serve` serves: the model in `folder` under `name`."""
    async with open_inference_client(config, folder) as client:
        yield serve_app(
            client.engine,
            client.renderer,
            encode=partial(encode, client.tokenizer),
            model=name,
            max_model_len=config.max_episode_tokens,
            api_key=api_key,
            max_sessions=config.generator.max_num_seqs,
            template_kwargs=config.generator.chat_template_kwargs,
        )


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
