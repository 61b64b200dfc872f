"""Sizes of weight deltas after real optimiser steps, in bfloat16, and the seconds to write and fetch them.

The tiny policy or SmolLM2-135M takes policy-gradient steps (AdamW) on random samples with all weights
or with LoRA. Each version is published to a temporary folder and fetched by a receiver, which verifies
it. `python -m benchmarks.delta_sizes --model tiny --lr 1e-5` prints one row per step.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import tempfile
from dataclasses import replace

import torch
from tests.fakes.samples import random_groups
from tests.fakes.tiny_policy import tiny_policy
from tests.learner.test_single_device_learner import SETTINGS, learner, on_policy
from torch import nn

from skyfleet.config.policy import Lora
from skyfleet.learner.optimizer import OptimizerSettings
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import load_model
from skyfleet.models.lora import add_adapters
from skyfleet.weight_transfer.delta_publisher import DeltaPublisher
from skyfleet.weight_transfer.delta_receiver import DeltaReceiver


def load(name: str, dtype: torch.dtype) -> nn.Module:
    if name == "tiny":
        module: nn.Module = copy.deepcopy(tiny_policy().decoder.module)
        return module.to(dtype)
    return load_model(name, dtype=dtype, device=torch.device("cpu"), config_kwargs={}).module


async def measure(name: str, lr: float, rank: int, dtype: torch.dtype, steps: int) -> None:
    module = load(name, dtype)
    if rank:
        add_adapters(module, Lora(rank=rank, alpha=rank), seed=1)
    decoder = Decoder(module, max_positions=256)
    student = learner(decoder, replace(SETTINGS, optimizer=OptimizerSettings(lr=lr)))
    with tempfile.TemporaryDirectory() as folder:
        publisher, receiver = DeltaPublisher(folder, dtype=torch.bfloat16), DeltaReceiver(folder)
        for step in range(steps + 1):
            if step:
                await student.step(on_policy(decoder, random_groups(2)))
            before = {
                name: weight.clone() for name, weight in receiver.named_weights(with_aliases=False)
            }
            written = publisher.publish(student.named_weights(), version=step)
            fetched = receiver.fetch(step)
            held = dict(receiver.named_weights(with_aliases=False))
            changed = sum(int((before[n] != w).sum()) for n, w in held.items() if n in before)
            whole = sum(weight.nbytes for weight in publisher.last_weights.values())
            cells = [
                *(name, f"LoRA {rank}" if rank else "all", f"{lr:g}", str(step)),
                *(f"{whole / 1e6:.2f}", f"{written.n_bytes / 1e6:.3f}"),
                f"{100 * written.n_bytes / whole:.2f} %",
                f"{100 * changed / (whole / 2):.2f} %" if step else "-",
                *(f"{written.seconds:.2f}", f"{fetched.seconds:.2f}"),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", choices=["tiny", "smollm2"])
    parser.add_argument("--lr", type=float, nargs="*", default=[1e-6, 1e-5])
    parser.add_argument("--rank", type=int, nargs="*", default=[0, 32])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="of the learner; published is bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    print(
        "| model | trained | learning rate | step | weights MB | delta MB | share | weights changed "
        "| s to publish | s to fetch |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    for lr in options.lr:
        for rank in options.rank:
            asyncio.run(measure(options.model, lr, rank, dtype, options.steps))


if __name__ == "__main__":
    main()
