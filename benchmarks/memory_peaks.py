"""Peak memory of a training run on a CPU, per stage, beside what the memory plan expects.

Each stage runs as in training: load the policy, fill the engine with as many sequences as it may run,
each of full length, and one policy update of one full micro-batch of distinct tokens, with its
optimizer step. Peaks are the kernel's (VmHWM), reset before each stage.

    python -m benchmarks.memory_peaks smollm2 --limit-gib 8 generator.max_num_seqs=8
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from skyfleet.algorithms.sample import Sample
from skyfleet.config.loading import load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.factory import build_embedded_engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.registry import env_factory
from skyfleet.learner.factory import build_critic, build_learner, max_tokens_per_microbatch
from skyfleet.learner.single_device import SingleDeviceLearner
from skyfleet.trainer.available_memory import GIB, AvailableMemory, read_cpu_memory
from skyfleet.trainer.fit_memory import FittedConfig, fit_training
from skyfleet.trainer.load_policy import load_policy_model
from skyfleet.trainer.memory_parts import MemoryPlan
from skyfleet.trainer.tasks import load_training_tasks


def read_status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


class Stages:
    """Measures stage after stage and prints one row for each."""

    def __init__(self, base: int) -> None:
        self._base, self._started = base, perf_counter()
        self.peak = 0
        print("| stage | peak GiB | planned GiB | after GiB | seconds |\n|---|---|---|---|---|")
        self._reset()

    def end(self, name: str, planned: int) -> None:
        peak, after = read_status("VmHWM"), read_status("VmRSS")
        self.peak = max(self.peak, peak)
        expected = f"{(planned + self._base) / GIB:.2f}" if planned else ""
        seconds = perf_counter() - self._started
        print(
            f"| {name} | {peak / GIB:.2f} | {expected} | {after / GIB:.2f} | {seconds:.0f} |",
            flush=True,
        )
        self._reset()

    def _reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._started = perf_counter()


def phase_bytes(plan: MemoryPlan, index: int) -> int:
    return sum(part.n_bytes for part in (*plan.held, *plan.phases[index]))


async def fill_engine(engine: EmbeddedEngine, config: RunConfig, n_new: int) -> None:
    """Every sequence the engine may run at once, each as long as an episode may be."""
    sampling = SamplingParams(max_generate_length=n_new, seed=1)
    length = config.max_episode_tokens - n_new
    rng = torch.Generator().manual_seed(1)

    async def generate(number: int) -> None:
        prompt = torch.randint(
            1, engine.decoder.vocab_size, (length,), generator=rng, device="cpu"
        ).tolist()
        await engine.generate(prompt, sampling, session=str(number))

    await asyncio.gather(*map(generate, range(config.generator.max_num_seqs)))


def make_samples(config: RunConfig, vocab_size: int) -> list[Sample]:
    """Distinct sequences of full length that fill one micro-batch; half of each is trained on."""
    length = config.max_episode_tokens
    rng = torch.Generator().manual_seed(2)
    samples: list[Sample] = []
    for number in range(max(1, max_tokens_per_microbatch(config) // length)):
        tokens = torch.randint(1, vocab_size, (length,), generator=rng).tolist()
        mask = [place >= length // 2 for place in range(length)]
        samples.append(
            Sample(
                task_key=f"t{number}",
                env_key="world",
                policy_version=0,
                token_ids=tuple(tokens),
                loss_mask=tuple(mask),
                logprobs=tuple(-1.0 if m else 0.0 for m in mask),
                advantages=tuple(1.0 if m else 0.0 for m in mask),
            )
        )
    return samples


async def measure(config: RunConfig, fitted: FittedConfig, *, n_new: int) -> None:
    plan = fitted.plan
    assert plan is not None
    stages = Stages(read_status("VmRSS"))
    open_env = env_factory(config)
    tasks = load_training_tasks(config)
    stages.end("tasks", 0)
    policy_model = await load_policy_model(config, tasks, open_env)
    stages.end("load", 0)
    engine = build_embedded_engine(config, policy_model.decoder, policy_model.renderer)
    assert isinstance(engine, EmbeddedEngine)
    critic = build_critic(config, policy_model, total_steps=10)
    learner: SingleDeviceLearner = build_learner(
        config, policy_model, lambda: Path("missing"), total_steps=10, critic=critic
    )
    samples = make_samples(config, policy_model.decoder.vocab_size)
    await learner.step(samples)
    stages.end(f"update, {len(samples)} sequences", phase_bytes(plan, 1))
    await engine.wake()
    stages.end("wake", 0)
    await fill_engine(engine, config, n_new)
    stages.end(f"generation, {config.generator.max_num_seqs} sequences", plan.generation_bytes)
    await engine.sleep()
    stages.end("sleep", 0)
    print(f"\npeak {stages.peak / GIB:.2f} GiB; {fitted.describe()}; changes: {fitted.changes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--limit-gib", type=float, help="Plan as if there were so much memory.")
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    config = load_config_file(arguments.preset, arguments.overrides)
    available = read_cpu_memory()
    assert available is not None
    if arguments.limit_gib:
        available = AvailableMemory(
            n_bytes=int(arguments.limit_gib * GIB),
            held_bytes=available.held_bytes,
            source="--limit-gib",
        )
    fitted = fit_training(config, available=available)
    asyncio.run(measure(fitted.config, fitted, n_new=arguments.new_tokens))


if __name__ == "__main__":
    main()
