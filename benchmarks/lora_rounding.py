"""Adapters merged into bfloat16 weights: how much of what they say arrives, on a CPU.

SmolLM2-135M with its weights in bfloat16's steps and adapters of rank 32 learns a text for a few
steps, in float32. After some of them its logprobs of another text are those of the exact sum, of the
sum rounded to bfloat16, and of the sum rounded with offsets (models/lora.py). Arithmetic stays in
float32 throughout, so that nothing but the weights' rounding differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyfleet.config.policy import Lora
from skyfleet.models.loading import load_model
from skyfleet.models.lora import LoraLinear, adapters, add_adapters, rounding_offsets

LEARNT, READ = Path("docs/worlds.md"), Path("docs/verifiers.md")
N_TOKENS, BATCH = 128, 4
STEPS = (1, 3, 10)
ROUNDINGS = ("exact", "as it is", "with offsets")


@torch.no_grad()
def put(layers: list[LoraLinear], rounding: str) -> None:
    for layer in layers:
        total = torch.addmm(layer.base, layer.lora_B, layer.lora_A, alpha=layer.scale)
        if rounding == "with offsets":
            total += rounding_offsets(layer.base.to(torch.bfloat16))
        layer.weight.copy_(total if rounding == "exact" else total.to(torch.bfloat16))


@torch.no_grad()
def logprobs_of(module: Any, token_ids_BL: Tensor) -> Tensor:
    logprobs_BLV = torch.log_softmax(module(token_ids_BL).logits[:, :-1], dim=-1)
    return logprobs_BLV.gather(2, token_ids_BL[:, 1:, None]).flatten()


def tokens_of(tokenizer: Any, path: Path, n_rows: int) -> Tensor:
    return torch.tensor(tokenizer(path.read_text())["input_ids"][: n_rows * N_TOKENS]).view(
        n_rows, N_TOKENS
    )


def measure(lr: float) -> None:
    loaded = load_model(
        "smollm2", dtype=torch.float32, device=torch.device("cpu"), config_kwargs={}
    )
    module: Any = loaded.module
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    add_adapters(module, Lora(rank=32, alpha=32), seed=1)
    layers = list(adapters(module).values())
    learnt_BL = tokens_of(loaded.tokenizer, LEARNT, 2 * BATCH)
    read_BL = tokens_of(loaded.tokenizer, READ, BATCH)
    optimizer = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=lr, weight_decay=0.0
    )
    before_N = logprobs_of(module, read_BL)
    for step in range(1, STEPS[-1] + 1):
        put(layers, "exact")
        batch_BL = learnt_BL[step % 2 :: 2]
        optimizer.zero_grad()
        module(batch_BL, labels=batch_BL).loss.backward()
        optimizer.step()
        if step not in STEPS:
            continue
        changes: dict[str, Tensor] = {}
        for rounding in ROUNDINGS:
            put(layers, rounding)
            changes[rounding] = logprobs_of(module, read_BL) - before_N
        exact_N = changes["exact"]
        size = float(exact_N.square().mean().sqrt())
        cells = [f"{lr:g}", str(step), f"{size:.4f}"]
        for rounding in ROUNDINGS[1:]:
            share = float((changes[rounding] * exact_N).sum() / exact_N.square().sum())
            off = float((changes[rounding] - exact_N).square().mean().sqrt())
            cells += [f"{100 * share:.0f} %", f"{off:.4f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lrs", type=float, nargs="*", default=[1e-5, 1e-4])
    options = parser.parse_args()
    print(
        "| learning rate | step | change of logprobs | rounded as it is: arrives | apart "
        "| with offsets: arrives | apart |\n|---|--:|--:|--:|--:|--:|--:|"
    )
    for lr in options.lrs:
        measure(lr)


if __name__ == "__main__":
    main()
