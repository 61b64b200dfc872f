"""Every kind of broken server: how its episodes end, and what that costs.

`python -m benchmarks.broken_servers`, from the repository's root; with names of kinds for only those.
Each kind is played once with time for all retries and once under a short time limit. Its siblings
run at the same time on the same client and must have the grade that they have alone.
"""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter, process_time

import psutil
from tests.engines.broken_server_runs import KINDS, play
from tests.engines.broken_servers import Client, Kind

from skyfleet.engines import http_client

LONG_SECONDS, SHORT_SECONDS = 60.0, 1.0
REQUEST_SECONDS = 2.0
"""The request timeout of kinds that do not answer at all."""


@dataclass(slots=True)
class Cost:
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_mib: float = 0.0
    left: int = 0
    """Threads, tasks and sockets that are still there afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    kind: Kind
    client: Client
    ending: str
    short_ending: str
    sentence: str
    is_expected: bool
    cost: Cost


def main() -> None:
    chosen = [KINDS[name] for name in sys.argv[1:]] or list(KINDS.values())
    http_client.INITIAL_BACKOFF_SECONDS, http_client.MAX_RETRY_AFTER_SECONDS = 0.05, 0.1
    results = asyncio.run(play_all(chosen))
    print("| server | client | ends | under a time limit | s | CPU s | peak MiB | left | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for result in results:
        cost = result.cost
        figures = f"{cost.seconds:.2f} | {cost.cpu_seconds:.2f} | {cost.peak_mib:.1f} | {cost.left}"
        print(
            f"| {result.kind.name} | {result.client} | {result.ending} | {result.short_ending} | "
            f"{figures} | {result.sentence.replace('|', '/')} |"
        )
    counts = Counter(result.is_expected for result in results)
    print(f"\n{len(chosen)} kinds, {len(results)} pairs of a kind and a client:")
    print(f"{counts[True]} end as promised, {counts[False]} do not.")
    for result in results:
        if not result.is_expected:
            print(f"not as promised: {result.kind.name}, {result.client}")


async def play_all(kinds: list[Kind]) -> list[Result]:
    await play(KINDS["slow but healthy"], "tokens", limit_seconds=LONG_SECONDS)  # imports, caches
    return [await measure(kind, client) for kind in kinds for client in kind.clients]


async def measure(kind: Kind, client: Client) -> Result:
    cost = Cost()
    async with measured(cost):
        ending, sentence = await end(kind, client, LONG_SECONDS)
    short_ending, _ = await end(kind, client, SHORT_SECONDS)
    expected = {"ungraded": "no grade", "graded": "graded as alone", "stops": "stops the run"}
    is_expected = (
        ending == expected[kind.ends]
        and (re.search(kind.sentence, sentence) is not None or kind.ends == "graded")
        and short_ending in (expected[kind.ends], "no grade")
        and cost.left == 0
    )
    return Result(
        kind=kind,
        client=client,
        ending=ending,
        short_ending=short_ending,
        sentence=re.sub(r"http://\S+?/v1\S*", "URL", sentence)[:160],
        is_expected=is_expected,
        cost=cost,
    )


async def end(kind: Kind, client: Client, limit_seconds: float) -> tuple[str, str]:
    """How the episodes of `kind` end, and the error of the first that fails."""
    timeout = REQUEST_SECONDS if kind.is_slow else LONG_SECONDS
    try:
        played = await play(
            kind, client, limit_seconds=limit_seconds, timeout_seconds=timeout, tries=8
        )
    except BaseExceptionGroup as stopped:
        error: BaseException = stopped
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return "stops the run", str(error)
    if [t.reward for t in played.siblings] != [1.0, 1.0]:
        return "siblings hurt", ""
    rewards = [t.reward for t in played.broken]
    failures = [t.failure.detail for t in played.broken if t.failure is not None]
    if set(rewards) == {1.0}:
        return "graded as alone", ""
    forged = any(reward not in (None, 1.0) for reward in rewards)
    return "forged a score" if forged else "no grade", (failures or [""])[0]


@asynccontextmanager
async def measured(cost: Cost) -> AsyncIterator[None]:
    """Time, peak memory and what is left, of client and server together."""
    process = psutil.Process()
    gc.collect()
    held, before = count_held(process), process.memory_info().rss
    sampler = asyncio.create_task(sample_memory(process, before, cost))
    started, cpu_started = perf_counter(), process_time()
    yield
    cost.seconds, cost.cpu_seconds = perf_counter() - started, process_time() - cpu_started
    sampler.cancel()
    for _ in range(50):
        await asyncio.sleep(0.02)
        cost.left = max(0, count_held(process) - held)
        if not cost.left:
            break


def count_held(process: psutil.Process) -> int:
    tasks = [task for task in asyncio.all_tasks() if "sample_memory" not in repr(task)]
    return threading.active_count() + len(tasks) + int(process.num_fds())


async def sample_memory(process: psutil.Process, before: int, cost: Cost) -> None:
    while True:
        grown = (process.memory_info().rss - before) / 2**20
        cost.peak_mib = max(cost.peak_mib, grown)
        await asyncio.sleep(0.005)


if __name__ == "__main__":
    main()
