"""The simulator against reality: predicted and measured seconds per step of runs on this machine.

    python -m benchmarks.simulator_error                  # all configurations, about five minutes
    python -m benchmarks.simulator_error --only async     # those whose name contains it

The tiny preset trains on an environment of a fixed number of turns whose calls take a given time. The
simulator knows the distribution of those times, not the times that were drawn. Costs are measured
shortly before each block of configurations, on one configuration without latency; nothing is fitted to
the runs that are predicted. One thread of torch. Where others use the cores, real steps are longer; the
time that our threads were ready and had no core, as Linux counts it, is therefore left out of
"measured". By the wall it is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from skyfleet.chat.message import Message
from skyfleet.config.loading import load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.envs.env import Observation, Step
from skyfleet.simulation.machine_plan import build_machine_system
from skyfleet.simulation.machine_profile import MachineProfile
from skyfleet.simulation.measure import measure_machine
from skyfleet.simulation.quiet_clock import read_quiet_clock
from skyfleet.simulation.run import SimulatedRun, simulate
from skyfleet.simulation.workload import Distribution, Workload
from skyfleet.tasks.task import Grade, Task
from skyfleet.trainer.assemble import GivenObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from skyfleet.trainer.callbacks import StepResult

PRESET = Path(__file__).parents[1] / "src" / "skyfleet" / "presets" / "tiny.yaml"
N_TURNS, N_NEW, REPLY_WORDS = 4, 24, 12
N_WARM_UP, N_STEPS, N_SEEDS = 2, 8, 5
N_TRIES, MOST_WAIT = 3, 0.05
"""A run that waited for cores for a larger share of its time is repeated."""
BLOCK = 4
"""Configurations between two measurements of costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    loop: str = "sync"
    latency: float = 0.0
    """Mean seconds of a tool call, and of the grade with one turn."""
    sigma: float = 0.0
    turns: int = N_TURNS
    batch: int = 8
    samples: int = 4
    places: int = 64
    """generator.max_num_seqs."""
    staleness: int = 1

    @property
    def name(self) -> str:
        kind = f"lognormal {self.sigma:g}" if self.sigma else "constant"
        loop = "sync" if self.loop == "sync" else f"async S={self.staleness}"
        return (
            f"{loop}, {1000 * self.latency:.0f} ms {kind}, {self.turns} turns, "
            f"{self.batch} x {self.samples}, {self.places} at once"
        )


CASES = (
    Case(),
    Case(turns=1),
    Case(turns=1, latency=0.2, sigma=0.5),
    Case(latency=0.05),
    Case(latency=0.2),
    Case(latency=0.2, sigma=0.5),
    Case(latency=0.05, sigma=0.5, batch=16),
    Case(latency=0.2, places=12),
    Case(batch=4, latency=0.2, sigma=0.5, samples=8),
    Case(loop="async"),
    Case(loop="async", latency=0.05, sigma=0.5),
    Case(loop="async", latency=0.2),
    Case(loop="async", latency=0.2, sigma=0.5),
    Case(loop="async", latency=0.2, sigma=0.5, batch=4, staleness=2),
    Case(loop="async", latency=0.2, sigma=0.5, places=24),
    Case(loop="async", latency=0.2, turns=1),
)


class SlowEnv:
    """A fixed number of turns; its calls sleep, and its rewards differ within every group."""

    def __init__(self, task: Task, attempt: int, case: Case) -> None:
        self._task, self._case, self._turn = task, case, 0
        self._rng = Random(f"{task.key}/{attempt}")

    async def reset(self) -> Observation:
        return Observation(messages=(Message(role="user", content=self._task.prompt),))

    async def step(self, action: Message) -> Step:
        self._turn += 1
        if self._turn == self._case.turns:
            return Step(done=True)
        await asyncio.sleep(self._draw())
        return Step(messages=(Message(role="user", content=words(REPLY_WORDS, self._rng)),))

    async def grade(self) -> Grade:
        if self._case.turns == 1:
            await asyncio.sleep(self._draw())
        return Grade(reward=self._rng.random(), success=False)

    async def close(self) -> None: ...

    def _draw(self) -> float:
        return distribution(self._case).draw(self._rng)


WORDS = [
    "north",
    "south",
    "east",
    "west",
    "lake",
    "hill",
    "road",
    "town",
    "gate",
    "wall",
    "rain",
    "wind",
    "stone",
    "field",
    "house",
    "bridge",
]


def words(n: int, rng: Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


def distribution(case: Case) -> Distribution:
    return Distribution(mean=case.latency, sigma=case.sigma)


def make_tasks() -> list[Task]:
    return [
        Task(key=f"t{number}", env_key="slow", prompt=words(40, Random(number)))
        for number in range(200)
    ]


def make_config(case: Case, folder: Path) -> RunConfig:
    is_async = case.loop == "async"
    steps = N_WARM_UP + N_STEPS + (case.staleness if is_async else 0)
    return load_config_file(
        PRESET,
        [
            f"trainer.run_path={folder / 'run'}",
            f"trainer.ckpt_path={folder / 'run' / 'checkpoints'}",
            "trainer.warm_start.steps=0",
            f"trainer.train_batch_size={case.batch}",
            f"trainer.policy_mini_batch_size={case.batch}",
            f"trainer.max_training_steps={steps}",
            "trainer.eval_before_train=false",
            "trainer.eval_interval=-1",
            "trainer.ckpt_interval=-1",
            "trainer.min_samples_per_env=0",
            "trainer.sentinels.mode=warn",
            f"trainer.fully_async.enabled={str(is_async).lower()}",
            f"trainer.fully_async.max_staleness_steps={case.staleness}",
            f"generator.n_samples_per_prompt={case.samples}",
            f"generator.max_num_seqs={case.places}",
            f"generator.max_turns={N_TURNS}",
            f"generator.sampling_params.max_generate_length={N_NEW}",
            f"generator.eval_sampling_params.max_generate_length={N_NEW}",
            "data.val_data=[]",
            "data.held_out_envs=[]",
        ],
    )


def make_given(case: Case) -> GivenObjects:
    numbers: dict[str, int] = {}

    async def open_env(task: Task) -> SlowEnv:
        numbers[task.key] = numbers.get(task.key, -1) + 1
        return SlowEnv(task, numbers[task.key], case)

    return GivenObjects(open_env=open_env, train_tasks=make_tasks(), eval_sets={})


async def run_real(case: Case, folder: Path) -> tuple[float, float]:
    """Seconds per step, from the end of the warm-up to the end of the last step that counts: by the
    wall, and without the time in which other processes had the core of one of our threads."""
    from skyfleet.trainer.loops import train_steps
    from skyfleet.trainer.training_run import open_training_run

    async with open_training_run(make_config(case, folder), given=make_given(case)) as run:
        steps = cast("AsyncGenerator[StepResult, None]", train_steps(run))
        async with aclosing(steps):
            ends = [(perf_counter(), read_quiet_clock()) async for _ in steps]
    first, last = ends[N_WARM_UP - 1], ends[N_WARM_UP + N_STEPS - 1]
    wall, quiet = ((b - a) / N_STEPS for a, b in zip(first, last, strict=True))
    return wall, quiet


def run_real_quietly(case: Case, folder: Path) -> tuple[float, float]:
    """Of several runs the one that waited least for cores."""
    runs = []
    for number in range(N_TRIES):
        runs.append(asyncio.run(run_real(case, folder / str(number))))
        if runs[-1][1] > (1 - MOST_WAIT) * runs[-1][0]:
            break
    return min(runs, key=lambda run: run[0] / run[1])


def predict(case: Case, profile: MachineProfile, folder: Path) -> tuple[float, float, float]:
    """Mean, smallest and largest seconds per step over seeds."""
    recorded = [episode[: case.turns] for episode in profile.workload.recorded]
    waits = {"grade_seconds" if case.turns == 1 else "tool_seconds": distribution(case)}
    workload = Workload(source="the same", recorded=recorded, **cast("Any", waits))
    config = make_config(case, folder)
    runs: list[SimulatedRun] = []
    for seed in range(N_SEEDS):
        system = build_machine_system(
            config, profile, workload, n_steps=N_WARM_UP + N_STEPS, seed=seed
        )
        runs.append(simulate(system, n_warm_up=N_WARM_UP))
    seconds = [run.step_seconds for run in runs]
    return fmean(seconds), min(seconds), max(seconds)


async def measure(case: Case, folder: Path) -> MachineProfile:
    plain = Case(loop=case.loop, staleness=case.staleness)
    return await measure_machine(make_config(plain, folder), given=make_given(plain))


def format_row(row: dict[str, Any]) -> str:
    quiet, wall = (f"{100 * find_error(row, name):+.0f} %" for name in ("quiet", "wall"))
    return (
        f"| {row['name']} | {row['predicted']:.3f} ({row['low']:.3f} to {row['high']:.3f}) | "
        f"{row['quiet']:.3f} | {quiet} | {row['wall']:.3f} | {wall} | {row['load']:.1f} |"
    )


def find_error(row: dict[str, Any], name: str) -> float:
    return float(row["predicted"] / row[name] - 1)


def run_cases(cases: Sequence[Case], out: Path | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    profile: MachineProfile | None = None
    measured_for = ("", -1)
    for number, case in enumerate(cases):
        with TemporaryDirectory() as scratch:
            folder = Path(scratch)
            block = (case.loop, number // BLOCK)
            if profile is None or block != measured_for:
                profile, measured_for = asyncio.run(measure(case, folder / "costs")), block
                if out:
                    with out.open("a") as file:
                        file.write(profile.model_dump_json(exclude={"workload"}) + "\n")
            predicted, low, high = predict(case, profile, folder)
            wall, quiet = run_real_quietly(case, folder / "real")
            row = asdict(case) | {
                "name": case.name, "predicted": predicted, "low": low, "high": high,
                "wall": wall, "quiet": quiet, "load": os.getloadavg()[0],
            }  # fmt: skip
            rows.append(row)
            print(format_row(row), flush=True)
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains it")
    parser.add_argument("--out", type=Path, help="add rows and profiles here, as JSON lines")
    options = parser.parse_args()
    print("| run | predicted, s per step | measured | error | by the wall | error | load |")
    print("|---|---|--:|--:|--:|--:|--:|")
    rows = run_cases([case for case in CASES if options.only in case.name], options.out)
    for name in ("quiet", "wall"):
        errors = [abs(find_error(row, name)) for row in rows]
        print(
            f"\n{name}: {sum(error <= 0.15 for error in errors)} of {len(errors)} within 15 %; median "
            f"error {100 * median(errors):.0f} %, largest {100 * max(errors):.0f} %"
        )


if __name__ == "__main__":
    main()
