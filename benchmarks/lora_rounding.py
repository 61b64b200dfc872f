"""LoRA adapters merged into bfloat16 weights: how much of their effect remains after rounding.

SmolLM2-135M, its weights rounded to bfloat16, is trained with adapters of rank 32 on one text. After
1, 3 and 10 steps the logprobs of another text are computed with the exact sum of base and adapters,
with the sum rounded to nearest, and with the sum rounded at a separate threshold per weight
(models/lora.py). All arithmetic is in float32, so only the rounding of the weights differs.

The texts are the beginnings of docs/worlds.md and docs/verifiers.md at commit 2a3004f, with which the
figures in docs/benchmarks.md were measured.
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

ASSETS = Path(__file__).parent / "assets"
TRAIN_TEXT, EVAL_TEXT = ASSETS / "lora_rounding_train.txt", ASSETS / "lora_rounding_eval.txt"
N_TOKENS, BATCH = 128, 4
STEPS = (1, 3, 10)
ROUNDINGS = ("exact", "to nearest", "with thresholds")


@torch.no_grad()
def set_weights(layers: list[LoraLinear], rounding: str) -> None:
    for layer in layers:
        total = torch.addmm(layer.base, layer.lora_B, layer.lora_A, alpha=layer.scale)
        if rounding == "with thresholds":
            total += rounding_offsets(layer.base.to(torch.bfloat16))
        layer.weight.copy_(total if rounding == "exact" else total.to(torch.bfloat16))


@torch.no_grad()
def compute_logprobs(module: Any, token_ids_BL: Tensor) -> Tensor:
    logprobs_BLV = torch.log_softmax(module(token_ids_BL).logits[:, :-1], dim=-1)
    return logprobs_BLV.gather(2, token_ids_BL[:, 1:, None]).flatten()


def encode(tokenizer: Any, path: Path, n_rows: int) -> Tensor:
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
    train_BL = encode(loaded.tokenizer, TRAIN_TEXT, 2 * BATCH)
    eval_BL = encode(loaded.tokenizer, EVAL_TEXT, BATCH)
    optimizer = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=lr, weight_decay=0.0
    )
    before_N = compute_logprobs(module, eval_BL)
    for step in range(1, STEPS[-1] + 1):
        set_weights(layers, "exact")
        batch_BL = train_BL[step % 2 :: 2]
        optimizer.zero_grad()
        module(batch_BL, labels=batch_BL).loss.backward()
        optimizer.step()
        if step not in STEPS:
            continue
        changes: dict[str, Tensor] = {}
        for rounding in ROUNDINGS:
            set_weights(layers, rounding)
            changes[rounding] = compute_logprobs(module, eval_BL) - before_N
        exact_N = changes["exact"]
        size = float(exact_N.square().mean().sqrt())
        cells = [f"{lr:.0e}".replace("e-0", "e-"), str(step), f"{size:.4f}"]
        for rounding in ROUNDINGS[1:]:
            slope = float((changes[rounding] * exact_N).sum() / exact_N.square().sum())
            error = float((changes[rounding] - exact_N).square().mean().sqrt())
            cells += [f"{100 * slope:.0f} %", f"{error:.4f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lrs", type=float, nargs="*", default=[1e-5, 1e-4])
    options = parser.parse_args()
    print(
        "| learning rate | step | change of logprobs | rounded to nearest: slope | error "
        "| with thresholds: slope | error |\n|---|--:|--:|--:|--:|--:|--:|"
    )
    for lr in options.lrs:
        measure(lr)


if __name__ == "__main__":
    main()
