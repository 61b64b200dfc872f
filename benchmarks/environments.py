"""Environments: time per step of each world, and scripted episodes per second through every adapter.

Every episode runs a reference solution to reward 1: reset, calls, verification, close. Server and
client share this process and its event loop, so the figure of an adapter is the cost of both.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from datetime import date
from itertools import cycle, islice
from pathlib import Path
from platform import machine, python_version, system
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import uvicorn

from skyfleet.curation.inspection import open_inspectable
from skyfleet.curation.validate import validate
from skyfleet.curation.verdict import open_journal
from skyfleet.envs.env import EnvFactory, close_env
from skyfleet.envs.fleet.env import fleet_factory
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.envs.mcp.client import MCPSettings, mcp_factory
from skyfleet.envs.mcp.grading import by_url
from skyfleet.envs.mcp.server import mcp_app
from skyfleet.envs.openenv.client import openenv_factory
from skyfleet.envs.openenv.server import openenv_app
from skyfleet.envs.openenv.session import OpenEnvSettings
from skyfleet.envs.tools import ToolError
from skyfleet.envs.verifiers import write_verifier
from skyfleet.envs.verifiers.run_verifier import load_state, run_verifier
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.tasks.task import Task
from skyfleet.trainer.training_run import tuned_gc
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks, get_world, open_world
from skyfleet.worlds.fleet_server.server import build_fleet_app

AT_ONCE = (1, 16, 64)
SESSIONS = 1000
LIMITS = Limits(max_turns=20, max_input_length=0, trajectory_timeout_seconds=300)

Adapter = Callable[[list[Task]], AbstractAsyncContextManager[EnvFactory]]


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def in_process(tasks: list[Task]) -> AsyncIterator[EnvFactory]:
    yield open_world


@asynccontextmanager
async def openenv(tasks: list[Task]) -> AsyncIterator[EnvFactory]:
    async with serving(openenv_app(tasks, open_world, max_sessions=2048)) as url:
        yield openenv_factory(OpenEnvSettings(base_url=url))


@asynccontextmanager
async def fleet(tasks: list[Task]) -> AsyncIterator[EnvFactory]:
    async with serving(build_fleet_app(tasks, api_key="key", max_instances=2048)) as url:
        yield fleet_factory(FleetSettings(api_key="key", base_url=url))


@asynccontextmanager
async def mcp(tasks: list[Task]) -> AsyncIterator[EnvFactory]:
    async with serving(mcp_app(tasks, open_world, max_sessions=2048)) as url:
        grade = by_url(f"{url}/{{task_key}}/grade")
        yield mcp_factory(MCPSettings(url=f"{url}/{{task_key}}/mcp", grade=grade))


ADAPTERS: dict[str, Adapter] = {
    "in process": in_process,
    "OpenEnv": openenv,
    "Fleet-compatible server": fleet,
    "MCP": mcp,
}


async def episodes_per_second(
    adapter: Adapter, tasks: list[Task], at_once: int, seconds: float
) -> tuple[float, float]:
    """By wall-clock time and by CPU time, which depends less on other work on the machine."""
    async with adapter(tasks) as open_env:
        # Warm-up: imports, certificates, the jail's first worker, one compiled verifier per task.
        await play(open_env, tasks, at_once)
        with tuned_gc():  # as the trainer does it
            n_played, start, cpu_start = 0, perf_counter(), process_time()
            while (spent := perf_counter() - start) < seconds:
                n_played += await play(open_env, tasks, at_once)
            return n_played / spent, n_played / (process_time() - cpu_start)


async def play(open_env: EnvFactory, tasks: list[Task], at_once: int) -> int:
    groups = await collect(
        tasks, open_env, oracle_policy, LIMITS, n_samples=1, max_concurrent=at_once
    )
    rewards = [attempt.reward for group in groups for attempt in group.trajectories]
    assert rewards == [1.0] * len(tasks), "a reference solution did not pass"
    return len(tasks)


def without_trust(tasks: list[Task]) -> list[Task]:
    """The same tasks with verifiers that are not our own, so that they run in the jail."""
    return [
        task.model_copy(update={"verifier_code": f"{task.verifier_code}\n# changed\n"})
        for task in tasks
    ]


async def verdicts_on(tasks: list[Task]) -> str:
    """The number of tasks per verdict of `skyfleet tasks validate`."""
    with (
        TemporaryDirectory() as folder,
        open_journal(Path(folder) / "journal", {}) as journal,
    ):
        verdicts = await validate({"all": tasks}, open_inspectable, journal=journal)
    counts = Counter("ok" if one.reason is None else one.reason.value for one in verdicts)
    return ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())


def world_row(name: str, tasks: list[Task], verdicts: str) -> str:
    """Medians over the reference calls of all tasks, each on a fresh database."""
    world = get_world(name)
    resets: list[float] = []
    reads: list[float] = []
    writes: list[float] = []
    verifications: list[float] = []
    for task in tasks:
        seed = int((task.data_key or "").removeprefix("seed-"))
        image = world.image(seed)
        start = perf_counter()
        app = world.open(seed, task.env_variables)
        resets.append(perf_counter() - start)
        with closing(app.db):
            answer = None
            for call in task.solution:
                if call.name == "submit_final_answer":
                    answer = call.arguments["answer"]
                    continue
                start = perf_counter()
                try:
                    world.toolkit.call(app, call.name, call.arguments)
                except ToolError:
                    continue
                spent = perf_counter() - start
                (writes if call.name in world.toolkit.writing else reads).append(spent)
            code = task.verifier_code or ""
            start = perf_counter()
            with closing(load_state(image)) as before:
                assert run_verifier(code, before, app.db.connection, answer).success
            verifications.append(perf_counter() - start)
    prompts = len({task.prompt for task in tasks})
    distinct = len({(task.prompt, str(task.solution)) for task in tasks})
    counted = f"{len(tasks)} | {verdicts} | {prompts} | {distinct} | {len(image) / 1024:.0f}"
    cells = (f"{1000 * median(times):.3f}" for times in (resets, reads, writes, verifications))
    return f"| {name} | {counted} | {' | '.join(cells)} |"


async def memory_row(name: str, adapter: Adapter, tasks: list[Task]) -> str:
    """Memory growth while SESSIONS episodes are open, server and client in this process."""
    async with adapter(tasks) as open_env:
        await play(open_env, tasks[:8], 8)
        before = resident_mebibytes()
        envs = []
        for task in islice(cycle(tasks), SESSIONS):
            env = await open_env(task)
            await env.reset()
            envs.append(env)
        grown = resident_mebibytes() - before
        for env in envs:
            await close_env(env)
    return f"| {name} | {grown:.0f} | {1024 * grown / SESSIONS:.0f} |"


def resident_mebibytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure_all(asked: argparse.Namespace, tasks: list[Task]) -> None:
    print(f"`python benchmarks/environments.py --tasks {asked.tasks} --seconds {asked.seconds:g}`")
    print(f"on {date.today()}: {system()} {machine()}, Python {python_version()}.\n")
    # First, because episodes are a tenth slower after all worlds were generated and validated.
    print(
        "| episodes per second | 1 at once | 16 | 64 | 64, per CPU-second |\n|---|---|---|---|---|"
    )
    for jailed in (False, True):
        played = without_trust(tasks) if jailed else tasks
        assert (
            any(write_verifier.is_written_here(task.verifier_code or "") for task in played)
            != jailed
        )
        for name, adapter in ADAPTERS.items():
            rates = [await episodes_per_second(adapter, played, n, asked.seconds) for n in AT_ONCE]
            cells = " | ".join(
                f"{rate:.0f}" for rate in (*(wall for wall, _ in rates), rates[-1][1])
            )
            print(f"| {name}{', jailed verifier' if jailed else ''} | {cells} |", flush=True)
    print(
        "\n| world | tasks | verdicts | distinct prompts | distinct tasks (prompt and solution) "
        "| image KiB | reset ms | read ms | write ms | verify ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in WORLD_NAMES:
        drawn = generate_world_tasks(name, split="all", count=asked.tasks)
        print(world_row(name, drawn, await verdicts_on(drawn)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", choices=ADAPTERS, help="print only the row of this adapter")
    parser.add_argument(
        "--tasks", type=int, default=200, help="tasks per world; validating 1,000 takes minutes"
    )
    parser.add_argument("--seconds", type=float, default=5, help="seconds per rate")
    asked = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # 1,000 episodes have two sockets each.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, most))
    tasks = generate_world_tasks("github", split="all", count=128)
    if asked.memory:
        print(asyncio.run(memory_row(asked.memory, ADAPTERS[asked.memory], tasks)))
        return
    asyncio.run(measure_all(asked, tasks))
    print(f"\n| {SESSIONS:,} open sessions | MiB | KiB per session |\n|---|---|---|", flush=True)
    for name in ADAPTERS:
        # A process per adapter, because memory that one frees would be reused by the next.
        subprocess.run([sys.executable, __file__, "--memory", name], check=True)


if __name__ == "__main__":
    main()
