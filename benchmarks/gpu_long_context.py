"""Decoding behind long prompts on one GPU, at the shape of Qwen3-8B: ours beside vLLM.

Every sequence has its own prompt, which is in the prefix cache when the clock starts. The time per
decoding step is the difference between a long and a short completion, divided by the tokens between
them. Prefill is the first call, with an empty cache. Weights are random. Run each side in its own
process: `python -m benchmarks.gpu_long_context --side embedded`, then `--side vllm`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from benchmarks.gpu_training import QWEN3_8B, model_of

from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.models.decoder import Decoder
from skyfleet.trainer.training_run import tuned_gc

CASES = ((1, 32_000), (4, 32_000), (12, 32_000), (16, 8_000), (64, 8_000))
"""Sequences, and tokens of prompt before each."""
N_SHORT, N_LONG = 8, 72
CAPACITY = 32_000 + N_LONG + 8
MAX_SEQUENCES = 64
CACHE_BYTES = 84 << 30
BYTES_PER_SECOND = 4.3e12
WEIGHT_BYTES = 2 * 7.57e9
KV_BYTES_PER_TOKEN = 2 * 2 * 36 * 8 * 128

Generate = Callable[[Sequence[Sequence[int]], int], None]
"""Prompts and the number of tokens to decode after each."""


def build_prompts(n: int, length: int, *, case: int) -> list[list[int]]:
    """Different prompts, and different from those of every other case."""
    return [[(17 * i + 101 * n + 7919 * case) % 100_000 for i in range(length)] for n in range(n)]


def embedded() -> Generate:
    engine = CudaEngine(
        Decoder(model_of(QWEN3_8B), max_positions=CAPACITY),
        decode_text=str,
        max_num_seqs=MAX_SEQUENCES,
        capacity=CAPACITY,
        max_num_batched_tokens=16_384,
        memory_bytes=CACHE_BYTES,
    )

    async def generate_all(prompts: Sequence[Sequence[int]], n_new: int) -> None:
        sampling = SamplingParams(max_generate_length=n_new, seed=0)
        await asyncio.gather(
            *(engine.generate(p, sampling, session=f"{i}") for i, p in enumerate(prompts))
        )

    return lambda prompts, n_new: asyncio.run(generate_all(prompts, n_new))


def vllm() -> Generate:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    folder = tempfile.mkdtemp()
    QWEN3_8B.architectures = ["Qwen3ForCausalLM"]
    QWEN3_8B.save_pretrained(folder)
    model = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=CAPACITY,
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=16_384,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=CACHE_BYTES,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        load_format="dummy",
        disable_log_stats=True,
    )

    def generate(prompts: Sequence[Sequence[int]], n_new: int) -> None:
        params = VllmParams(max_tokens=n_new, ignore_eos=True, logprobs=0, detokenize=False)
        model.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)

    return generate


def measure(generate: Generate, prompts: Sequence[Sequence[int]], n_new: int) -> float:
    torch.cuda.synchronize()
    start = perf_counter()
    generate(prompts, n_new)
    torch.cuda.synchronize()
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["embedded", "vllm"], required=True)
    side = parser.parse_args().side
    generate = embedded() if side == "embedded" else vllm()
    generate(build_prompts(2, 100, case=99), N_SHORT)
    with tuned_gc():
        for case, (n, length) in enumerate(CASES):
            prompts = build_prompts(n, length, case=case)
            prefill = measure(generate, prompts, 1)
            measure(generate, prompts, N_LONG)
            steps = [
                measure(generate, prompts, N_LONG) - measure(generate, prompts, N_SHORT)
                for _ in range(3)
            ]
            kv_bytes = KV_BYTES_PER_TOKEN * n * length
            row = {
                "side": side,
                "sequences": n,
                "prompt_tokens": length,
                "ms_per_step": round(min(steps) / (N_LONG - N_SHORT) * 1e3, 2),
                "memory_bandwidth_limit_ms": round(
                    (WEIGHT_BYTES + kv_bytes) / BYTES_PER_SECOND * 1e3, 1
                ),
                "prefill_seconds": round(prefill, 2),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
