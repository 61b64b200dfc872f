"""Reward against samples of the synchronous and the asynchronous loop, over several seeds.

Both loops train the tiny preset on the same tasks with the same seeds; tool calls can be given a
latency, as environments have. Per window of steps: the mean training reward over seeds with a 95 %
interval of Student's t, and at the end the paired difference, the seconds and the tokens per second.
`python -m benchmarks.async_learning --seeds 5` on a quiet machine; `--steps 4 --seeds 2 --small` tries it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from skyfleet.chat.message import Message
from skyfleet.config.loading import load_config_file
from skyfleet.envs.env import Env, EnvFactory, Step
from skyfleet.envs.registry import env_factory
from skyfleet.tasks.task import Task
from skyfleet.trainer.assemble import GivenObjects
from skyfleet.trainer.training_run import run_training

PRESET = Path(__file__).parents[1] / "src" / "skyfleet" / "presets" / "tiny.yaml"
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Two-sided 95 % quantile of Student's t by the number of seeds."""
SMALL = (
    "trainer.train_batch_size=3",
    "trainer.policy_mini_batch_size=3",
    "trainer.warm_start.steps=5",
    "generator.n_samples_per_prompt=2",
    "trainer.policy.model_config_kwargs.hidden_size=32",
    "trainer.policy.model_config_kwargs.num_hidden_layers=1",
    "data.train_data=['world:github?split=train&count=24&max_difficulty=1']",
    "data.val_data=[]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    loop: str
    seed: int
    rewards: list[float]
    """By step."""
    seconds: float
    tokens_per_second: float
    staleness: float


def add_latency(open_env: EnvFactory, median_seconds: float, sigma: float, seed: int) -> EnvFactory:
    """Every tool call takes a lognormal time."""
    rng = Random(seed)

    async def open_slow(task: Task) -> Env:
        env: Any = await open_env(task)
        take_step = env.step

        async def step(action: Message) -> Step:
            await asyncio.sleep(median_seconds * exp(rng.gauss(0.0, sigma)))
            taken: Step = await take_step(action)
            return taken

        env.step = step
        opened: Env = env
        return opened

    return open_slow if median_seconds else open_env


async def train(arguments: argparse.Namespace, loop: str, seed: int, folder: Path) -> Curve:
    overrides = [
        f"trainer.run_path={folder}",
        f"trainer.seed={seed}",
        f"trainer.max_training_steps={arguments.steps}",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1",
        f"trainer.fully_async.enabled={str(loop == 'asynchronous').lower()}",
        f"trainer.fully_async.max_staleness_steps={arguments.staleness}",
        *(SMALL if arguments.small else ()),
    ]
    config = load_config_file(PRESET, overrides)
    open_env = add_latency(env_factory(config), arguments.latency, arguments.sigma, seed)
    start = perf_counter()
    await run_training(config, given=GivenObjects(open_env=open_env))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][1:]
    timed = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()][1:]
    seconds = sum(row["timing/step"] for row in timed)
    n_episodes = config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    tokens = n_episodes * sum(row["generate/avg_num_tokens"] for row in rows)
    return Curve(
        loop=loop,
        seed=seed,
        rewards=[row["reward/avg_raw_reward"] for row in rows],
        seconds=perf_counter() - start,
        tokens_per_second=tokens / seconds,
        staleness=fmean(row.get("async/staleness_mean", 0.0) for row in rows),
    )


def interval(values: Sequence[float]) -> str:
    """The mean, with a 95 % interval from two values on."""
    if len(values) < 2:
        return f"{fmean(values):.3f}"
    half = T_95.get(len(values), 1.96) * stdev(values) / sqrt(len(values))
    return f"{fmean(values):.3f} ({fmean(values) - half:.3f} to {fmean(values) + half:.3f})"


def print_curves(curves: Sequence[Curve], samples_per_step: int, n_windows: int) -> None:
    by_loop = {
        loop: [curve for curve in curves if curve.loop == loop]
        for loop in ("synchronous", "asynchronous")
    }
    n_steps = len(curves[0].rewards)
    width = max(1, n_steps // n_windows)
    print("| samples | synchronous | asynchronous | difference |\n|---|---|---|---|")
    for begin in range(0, n_steps - width + 1, width):
        means = {
            loop: [fmean(curve.rewards[begin : begin + width]) for curve in own]
            for loop, own in by_loop.items()
        }
        paired = [b - a for a, b in zip(*means.values(), strict=True)]
        cells = (interval(means["synchronous"]), interval(means["asynchronous"]), interval(paired))
        print(f"| {(begin + width) * samples_per_step} | {' | '.join(cells)} |")
    for loop, own in by_loop.items():
        print(
            f"{loop}: {interval([c.seconds for c in own])} s, "
            f"{interval([c.tokens_per_second for c in own])} tokens/s while training, "
            f"staleness {fmean(c.staleness for c in own):.2f}"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--latency", type=float, default=0.2, help="median seconds of a tool call")
    parser.add_argument("--sigma", type=float, default=0.5, help="of its logarithm")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--small", action="store_true", help="a smaller model and batch")
    parser.add_argument("--out", type=Path, help="write the curves here, as JSON lines")
    arguments = parser.parse_args()
    curves: list[Curve] = []
    for seed in range(1, arguments.seeds + 1):
        for loop in ("synchronous", "asynchronous"):
            with TemporaryDirectory() as folder:
                curves.append(await train(arguments, loop, seed, Path(folder) / "run"))
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(asdict(curves[-1])) + "\n")
    config = load_config_file(PRESET, SMALL if arguments.small else ())
    samples = config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    print_curves(curves, samples, arguments.windows)


if __name__ == "__main__":
    asyncio.run(main())
