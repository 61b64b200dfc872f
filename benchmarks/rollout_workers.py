"""Episodes per second over rollout workers, and many open episodes at once.

`python -m benchmarks.rollout_workers`, from the repository's root. Worlds are played by their
reference solutions, which need no engine; a jailed task has a verifier of somebody else. The last
table is of an engine that answers at once: what the driver can forward.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter

import psutil
from tests.fakes.local_workers import SeededEngine, open_counter, seeded_agent

from skyfleet.cluster.placement import Placement
from skyfleet.cluster.ray_session import RaySession, open_ray
from skyfleet.cluster.ray_workers import open_rollout_pool
from skyfleet.config.loading import load_config
from skyfleet.config.root import RunConfig
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.registry import env_factory
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import EpisodeRunner, Limits, collect, run_episode
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import generate_world_tasks

LIMITS = Limits(max_turns=12, max_input_length=100_000, trajectory_timeout_seconds=600)
FOREIGN = "\n# written by somebody else\n"
READY_SECONDS, TICK_SECONDS = 180.0, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--open", type=int, default=10_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    asyncio.run(measure_all(parser.parse_args()))


async def measure_all(arguments: argparse.Namespace) -> None:
    config = load_config("{}", [])
    worlds = generate_world_tasks("booking", split="train", count=arguments.episodes)
    jailed = [
        task.model_copy(update={"verifier_code": f"{task.verifier_code}{FOREIGN}"})
        for task in worlds
    ]
    counters = [Task(key=f"t{i}", env_key="counter", prompt="") for i in range(arguments.episodes)]
    open_world = env_factory(config)
    cases: list[tuple[str, Sequence[Task], EnvFactory, AgentFactory]] = [
        ("built-in", worlds, open_world, oracle_policy),
        ("jailed", jailed[: arguments.episodes // 3], open_world, oracle_policy),
        ("engine turns", counters, open_counter, seeded_agent(SeededEngine())),
    ]
    print(f"{os.cpu_count()} CPU cores\n")
    print("| workers | " + " | ".join(f"{name}, episodes/s" for name, *_ in cases) + " |")
    print("|---" * (len(cases) + 1) + "|", flush=True)
    print(await measure_row("in the driver", cases, run_episode), flush=True)
    most = max(arguments.workers)
    async with open_ray(make_placement(most), ready_timeout_seconds=READY_SECONDS) as session:
        for n_workers in arguments.workers:
            async with open_rollout_pool(
                session, workers_per_node=n_workers, ready_timeout_seconds=READY_SECONDS
            ) as pool:
                add_world(pool.add_env, open_world, config)
                print(await measure_row(str(n_workers), cases, pool.run), flush=True)
        await measure_open(session, arguments.open, most)


def add_world(add_env: object, open_world: EnvFactory, config: RunConfig) -> None:
    add_env(open_world, partial(env_factory, config))  # type: ignore[operator]


def make_placement(n_workers: int) -> Placement:
    return Placement(
        n_ranks=0,
        ranks_per_node=1,
        n_engines=0,
        gpus_per_engine=1,
        is_colocated=True,
        workers_per_node=n_workers,
        uses_gpus=False,
    )


async def measure_row(
    name: str,
    cases: Sequence[tuple[str, Sequence[Task], EnvFactory, AgentFactory]],
    run: EpisodeRunner,
) -> str:
    rates = []
    for _, tasks, open_env, agent in cases:
        for part in (tasks[:20], tasks):  # the first starts what is started once
            start = perf_counter()
            groups = await collect(
                part, open_env, agent, LIMITS, n_samples=1, max_concurrent=64, run=run
            )
            seconds = perf_counter() - start
        failed = [t.failure for group in groups for t in group.trajectories if t.failure]
        assert not failed, failed[0]
        rates.append(f"{len(tasks) / seconds:.0f}")
    return f"| {name} | {' | '.join(rates)} |"


async def measure_open(session: RaySession, n_open: int, n_workers: int) -> None:
    """Episodes that all wait for the engine at once."""
    engine, late = SeededEngine(seconds=3600), Lateness()
    tasks = [Task(key=f"t{i}", env_key="counter", prompt="") for i in range(n_open)]
    async with open_rollout_pool(
        session, workers_per_node=n_workers, ready_timeout_seconds=READY_SECONDS
    ) as pool:
        before, start = read_bytes(), perf_counter()
        agent = seeded_agent(engine)
        playing = [asyncio.create_task(pool.run(t, open_counter, agent, LIMITS)) for t in tasks]
        ticking = asyncio.create_task(late.tick())
        while engine.n_running < n_open:  # noqa: ASYNC110 - a benchmark
            await asyncio.sleep(TICK_SECONDS)
        opened = perf_counter() - start
        late.worst = 0.0
        await asyncio.sleep(5)
        after = read_bytes()
        ticking.cancel()
        print(f"\n{n_open} open episodes on {n_workers} workers, opened in {opened:.1f} s")
        for name in after:
            each = (after[name] - before[name]) / n_open / 1024
            print(f"- {name}: {each:.1f} KiB per episode, {after[name] / 2**20:.0f} MiB")
        print(
            f"- event loop of the driver, idle with them: at most {late.worst * 1000:.0f} ms late"
        )
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


class Lateness:
    worst = 0.0

    async def tick(self) -> None:
        while True:
            start = perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            self.worst = max(self.worst, perf_counter() - start - TICK_SECONDS)


def read_bytes() -> dict[str, int]:
    """Memory of the driver and of the workers, without pages that they share."""
    own, workers = psutil.Process(), 0
    for child in own.children(recursive=True):
        with suppress(psutil.Error, IndexError):
            if child.cmdline()[0].startswith("ray::RolloutWorker"):
                workers += child.memory_full_info().uss
    return {"driver": own.memory_full_info().uss, "workers": workers}


if __name__ == "__main__":
    main()
