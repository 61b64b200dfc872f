"""Milliseconds per verification: in process, in the jail, and in a subprocess without bubblewrap."""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import date
from platform import machine, python_version, system
from statistics import quantiles
from time import perf_counter

from skyfleet.envs.verifiers.grading import grade_state
from skyfleet.envs.verifiers.jail import Jail
from skyfleet.worlds.catalog import generate_world_tasks, get_world

WARM_UP = 10


async def measure(verify: Callable[[], Awaitable[object]], n_times: int) -> tuple[float, float]:
    """The median and the 95th percentile."""
    taken = []
    for _ in range(WARM_UP + n_times):
        begin = perf_counter()
        await verify()
        taken.append(1000 * (perf_counter() - begin))
    cuts = quantiles(taken[WARM_UP:], n=20)
    return cuts[9], cuts[18]


async def measure_all(n_times: int) -> None:
    (task,) = generate_world_tasks("booking", split="all", count=1)
    code, world = task.verifier_code, get_world("booking")
    assert code is not None
    assert task.data_key is not None
    data_seed = int(task.data_key.removeprefix("seed-"))
    seed, app = world.image(data_seed), world.open(data_seed, task.env_variables)
    # Two states with equal bytes would not be compared, so change one.
    for call in task.solution:
        world.toolkit.call(app, call.name, call.arguments)
    current, foreign = app.db.connection, code + "# changed\n"
    with (
        closing(app.db),
        Jail(n_workers=1) as jail,
        Jail(n_workers=1, bwrap="/not/installed/bwrap") as plain,
    ):

        def graded(source: str, where: Jail | None) -> Callable[[], Awaitable[None]]:
            async def verify() -> None:
                assert (await grade_state(source, seed, current, None, jail=where)).success

            return verify

        trivial = "def verify(env): return 1"
        print(
            f"Two booking databases of {len(seed) / 1000:.0f} kB, before and after a reference solution:\n"
        )
        print("| verification | p50 ms | p95 ms |", "|---|---|---|", sep="\n")
        for name, source, where in (
            ("the world's own verifier, in process", code, None),
            ("same, in the jail", foreign, jail),
            ("same, subprocess without bubblewrap", foreign, plain),
            ("`return 1`, in the jail", trivial, jail),
        ):
            p50, p95 = await measure(graded(source, where), n_times)
            print(f"| {name} | {p50:.2f} | {p95:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200, help="measured verifications per row")
    n_times: int = parser.parse_args().times
    print(
        f"`python benchmarks/verifier_jail.py --times {n_times}` on {date.today()}: "
        f"{system()} {machine()}, Python {python_version()}, SQLite {sqlite3.sqlite_version}."
    )
    asyncio.run(measure_all(n_times))


if __name__ == "__main__":
    main()
