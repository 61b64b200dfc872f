"""Forward and backward pass on one GPU: tokens per second, share of peak FLOP/s, peak memory.

Random tokens, no shared prefixes, no optimiser step: `action_logprobs` of every token and its
gradient, as the learner computes them. Memory includes weights, float32 gradients and activations,
but no optimiser state. The same run also measures SmolLM2's shape with transformers and SDPA.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from skyfleet.algorithms.sample import Sample
from skyfleet.config.policy import Lora
from skyfleet.learner.batching import MicroBatch, action_logprobs, pack
from skyfleet.models.decoder import Decoder
from skyfleet.models.lora import add_adapters

PEAK_FLOPS = 790e12
"""Dense bfloat16 FLOP/s of an H200, as measured; the data sheet says 989e12."""

SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    max_position_embeddings=8192, rms_norm_eps=1e-5,
)  # fmt: skip
QWEN3_06B = Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    max_position_embeddings=1 << 20,
)  # fmt: skip
QWEN3_8B = Qwen3Config(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    max_position_embeddings=1 << 20,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    config: Any
    lengths: Sequence[int]
    lora_rank: int = 0
    recompute: bool = False


CASES = {
    case.name: case
    for case in (
        Case(name="smollm2 32x1024", config=SMOLLM2, lengths=[1024] * 32),
        Case(name="qwen3-0.6b 16k", config=QWEN3_06B, lengths=[4096] * 4),
        Case(name="qwen3-0.6b 64k", config=QWEN3_06B, lengths=[4096] * 16),
        Case(name="qwen3-8b lora 16k", config=QWEN3_8B, lengths=[4096] * 4, lora_rank=32),
        Case(
            name="qwen3-8b lora 64k",
            config=QWEN3_8B,
            lengths=[4096] * 16,
            lora_rank=32,
            recompute=True,
        ),
        Case(name="qwen3-8b full 16k", config=QWEN3_8B, lengths=[4096] * 4, recompute=True),
    )
}


def model_of(config: Any, *, lora_rank: int = 0) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if lora_rank:
        add_adapters(module, Lora(rank=lora_rank, alpha=lora_rank), seed=0)
    return module


def make_batch(lengths: Sequence[int], vocab_size: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index, n in enumerate(lengths):
        tokens = tuple(torch.randint(vocab_size, (n,), generator=generator).tolist())
        samples.append(
            Sample(
                task_key=str(index),
                env_key="random",
                token_ids=tokens,
                loss_mask=(False, *[True] * (n - 1)),
                logprobs=(0.0,) * n,
                advantages=(1.0,) * n,
                policy_version=0,
            )
        )
    weights = [1 / sum(lengths)] * len(samples)
    (batch,) = pack(
        samples, weights, max_tokens=len(lengths) * max(lengths), device=torch.device("cuda")
    )
    return batch


def measure_seconds(run: Callable[[], None], *, times: int) -> float:
    """Median of `times` calls after one warm-up call; with `times=0`, the time of that one call."""
    seconds = []
    for _ in range(times + 1):
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return median(seconds[1:] or seconds)


def count_flops(module: Any, config: Any, lengths: Sequence[int], *, trains_all: bool) -> float:
    """Required floating-point operations; recomputed ones count once."""
    matrices = sum(p.numel() for n, p in module.named_parameters() if "lora_" not in n)
    if not config.tie_word_embeddings:
        matrices -= config.vocab_size * config.hidden_size  # an embedding lookup multiplies nothing
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    attention = sum(2 * n * n * width for n in lengths) * config.num_hidden_layers
    # Frozen weights need no weight gradient.
    passes = 3 if trains_all else 2
    return float(2 * matrices * sum(lengths) * passes + attention * 3.5)


def measure_skyfleet(case: Case, *, times: int) -> dict[str, Any]:
    module = model_of(case.config, lora_rank=case.lora_rank)
    decoder = Decoder(module, max_positions=max(case.lengths))
    batch = make_batch(case.lengths, case.config.vocab_size)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32  # as in the learner
    torch.cuda.reset_peak_memory_stats()

    def run() -> None:
        logprobs_N, _ = action_logprobs(decoder, batch, temperature=1.0, recompute=case.recompute)
        (logprobs_N * batch.weights_N).sum().backward()
        module.zero_grad()

    seconds = measure_seconds(run, times=times)
    flops = count_flops(module, case.config, case.lengths, trains_all=not case.lora_rank)
    return _row("skyfleet", case, seconds, flops)


def measure_transformers(case: Case, *, times: int) -> dict[str, Any]:
    module = model_of(case.config)
    module.set_attn_implementation("sdpa")
    token_ids = torch.randint(case.config.vocab_size, (len(case.lengths), case.lengths[0])).cuda()
    torch.cuda.reset_peak_memory_stats()

    def run() -> None:
        module(input_ids=token_ids, labels=token_ids, use_cache=False).loss.backward()
        module.zero_grad()

    seconds = measure_seconds(run, times=times)
    return _row(
        "transformers, SDPA",
        case,
        seconds,
        count_flops(module, case.config, case.lengths, trains_all=True),
    )


def make_long_case(n: int) -> Case:
    return Case(
        name=f"qwen3-8b lora, one of {n}",
        config=QWEN3_8B,
        lengths=[n],
        lora_rank=32,
        recompute=True,
    )


def _row(side: str, case: Case, seconds: float, flops: float) -> dict[str, Any]:
    return {
        "side": side,
        "case": case.name,
        "tokens_per_second": round(sum(case.lengths) / seconds),
        "ms": round(seconds * 1e3, 1),
        "share_of_peak": round(flops / seconds / PEAK_FLOPS, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument(
        "--longest",
        type=int,
        nargs="*",
        default=[],
        help="sequence lengths to try for Qwen3-8B with LoRA",
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    jobs: list[tuple[Callable[..., dict[str, Any]], Case, int]] = []
    for case in (CASES[name] for name in options.cases):
        if case.config is SMOLLM2:
            jobs.append((measure_transformers, case, options.times))
        jobs.append((measure_skyfleet, case, options.times))
    if options.longest:
        measure_skyfleet(make_long_case(2048), times=0)  # compiles the kernels of the long cases
    jobs += [(measure_skyfleet, make_long_case(n), 0) for n in options.longest]
    for job, case, times in jobs:
        try:
            row = job(case, times=times)
        except torch.OutOfMemoryError as error:
            row = {"case": case.name, "failed": str(error)[:120]}
        print(json.dumps(row), flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
