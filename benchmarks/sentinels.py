"""The cost of each sentinel, in milliseconds of one CPU core per step.

`python -m benchmarks.sentinels`, from the repository's root. Two runs: `tiny`
after its warm start, and a batch as a GPU has it, 64 prompts x 8 attempts of about 256 + 128 tokens
with random rewards. The cost depends on episodes and tokens and not on the model, so the
second run has a tiny one; overrides such as `trainer.device=cuda` change it. Medians over steps.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import tempfile
from collections import defaultdict
from contextlib import redirect_stdout
from dataclasses import replace
from functools import wraps
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from typing import Any
from unittest.mock import patch

os.environ |= {"OMP_NUM_THREADS": "1"}

import torch

from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Completion
from skyfleet.config.loading import load_config, load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation, Step
from skyfleet.sentinels import checker
from skyfleet.sentinels.finding import Finding, Sentinel
from skyfleet.sentinels.recording_engine import RecordingEngine
from skyfleet.sentinels.registry import SENTINELS
from skyfleet.tasks.task import Grade, Task
from skyfleet.trainer.assemble import assemble
from skyfleet.trainer.loop import finish_step, train_step
from skyfleet.trainer.sft import warm_start
from skyfleet.trainer.training_run import tuned_gc

QUIETLY = (
    *("trainer.eval_before_train=false", "trainer.eval_interval=-1", "trainer.ckpt_interval=-1"),
    "trainer.max_training_steps=1000",
)
LARGE = """
trainer:
  policy:
    model: {path: tiny}
    model_config_kwargs: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
      num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, vocab_size: 2048}
  algorithm: {use_kl_loss: false}
  train_batch_size: 64
  policy_mini_batch_size: 64
  max_tokens_per_microbatch: 16384
  epochs: 1000
  max_prompt_length: 384
generator:
  n_samples_per_prompt: 8
  max_turns: 1
  max_input_length: 384
  max_num_seqs: 512
  trajectory_timeout_seconds: 0
  sampling_params: {max_generate_length: 128}
environment: {env_class: "benchmarks.sentinels:open_coin"}
data: {allow_unmanifested: true}
"""
RECORDS = "records: completions, sums of samples, fingerprint of the weights"
RECORDING = "recording engine"


class Coin:
    """Ends after one turn with a reward of 1 or 0 by chance."""

    def __init__(self, task: Task) -> None:
        self._observation = Observation(messages=(Message(role="user", content=task.prompt),))

    async def reset(self) -> Observation:
        return self._observation

    async def step(self, action: Message) -> Step:
        return Step(done=True)

    async def grade(self) -> Grade:
        reward = float(CHANCE.random() < 0.5)
        return Grade(reward=reward, success=reward > 0)

    async def close(self) -> None: ...


CHANCE = Random(17)


async def open_coin(task: Task) -> Coin:
    return Coin(task)


def write_tasks(path: Path) -> None:
    words = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]
    rows = (
        {"key": f"task-{i}", "env_key": "coin", "prompt": " ".join(CHANCE.choices(words, k=240))}
        for i in range(64)
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


class Echo:
    """An engine that takes no time."""

    policy_version = 0
    completion = Completion(token_ids=(0,), logprobs=(0.0,), finish="stop", policy_version=0)

    async def generate(self, token_ids: object, sampling: object, *, session: str) -> Completion:
        return self.completion


async def recording_seconds(n: int = 2000) -> float:
    """The cost of recording one turn."""
    echo: Any = Echo()
    prompt, sampling = list(range(400)), SamplingParams()

    async def spent(engine: Any) -> float:
        start = process_time()
        for i in range(n):
            await engine.generate(prompt, sampling, session=f"task/{i}")
        return process_time() - start

    return (await spent(RecordingEngine(echo)) - await spent(echo)) / n


def timed(sentinel: Sentinel[Any], spent: dict[str, float]) -> Sentinel[Any]:
    check = sentinel.check

    @wraps(check)
    def timed_check(stage: Any) -> Finding | None:
        start = process_time()
        try:
            return check(stage)
        finally:
            spent[sentinel.name] = process_time() - start

    return replace(sentinel, check=timed_check)


async def measure(config: RunConfig, steps: int) -> dict[str, float]:
    """Seconds of a median step, and of each sentinel in it."""
    run = await assemble(config)
    n_episodes = config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    seconds_per_turn = await recording_seconds()
    spent: dict[str, float] = {}
    each: dict[str, list[float]] = defaultdict(list)
    try:
        await warm_start(run)
        run.state.logged_step = 0
        sentinels = tuple(timed(sentinel, spent) for sentinel in SENTINELS)
        # CPU time, because others use the machine too.
        with tuned_gc(), patch.multiple(checker, SENTINELS=sentinels, perf_counter=process_time):
            for step in range(1, steps + 2):
                spent.clear()
                start = process_time()
                await train_step(run, step)
                whole, metrics = process_time() - start, run.log.pending
                await finish_step(run)
                if step == 1:
                    continue  # it computes the fingerprint twice
                spent[RECORDS] = metrics["timing/sentinels"] - sum(spent.values())
                spent[RECORDING] = seconds_per_turn * n_episodes * metrics["environment/avg_turns"]
                for name, seconds in (spent | {"step": whole}).items():
                    each[name].append(seconds)
    finally:
        run.log.close()
    return {name: median(seconds) for name, seconds in each.items()}


def table(runs: dict[str, dict[str, float]]) -> str:
    """One row per sentinel, the most expensive first, and their share of a step."""
    names = sorted(
        {name for run in runs.values() for name in run} - {"step"},
        key=lambda name: -sum(run.get(name, 0.0) for run in runs.values()),
    )
    rows = [[name, *(f"{1e3 * run.get(name, 0.0):.2f}" for run in runs.values())] for name in names]
    totals = [sum(run.values()) - run["step"] for run in runs.values()]
    rows.append(["**all**", *(f"**{1e3 * total:.1f}**" for total in totals)])
    rows.append(["step, s", *(f"{run['step']:.2f}" for run in runs.values())])
    shares = (total / run["step"] for total, run in zip(totals, runs.values(), strict=True))
    rows.append(["all, share of a step", *(f"{share:.2%}" for share in shares)])
    head = [["ms per step", *runs], ["---", *("---:" for _ in runs)]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in head + rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="number of measured steps")
    parser.add_argument("--only-large", action="store_true", help="measure the large run only")
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides of the large run")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        tasks = Path(folder, "tasks.jsonl")
        write_tasks(tasks)
        places = [f"trainer.run_path={folder}/large", f"data.train_data=[{tasks}]"]
        configs = {"512 x 384 tokens": load_config(LARGE, [*QUIETLY, *places, *chosen.words])}
        if not chosen.only_large:
            laptop = [*QUIETLY, f"trainer.run_path={folder}/laptop"]
            configs["laptop"] = load_config_file("tiny", laptop)
        runs = {name: asyncio.run(measure(c, chosen.steps)) for name, c in configs.items()}
    print(table(runs))


if __name__ == "__main__":
    main()
