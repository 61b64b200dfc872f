"""Decoding on one GPU: tokens per second with logprobs, ours beside vLLM and `transformers.generate`.

Two cases. `smollm2`: SmolLM2-135M in bfloat16, short prompts of their own, 128 new tokens, 1 to 1024
sequences at once. `qwen3-8b`: the shape of Qwen3-8B with random weights, 256 sequences behind one
prompt of 2,048 tokens. Each side is a process of its own: run it once for each, one after another.
The gap is that of the sampled tokens' logprobs to the learner's, which computes them in one pack.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from benchmarks.gpu_training import QWEN3_8B, model_of

from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import load_model, save_model
from skyfleet.models.packed import PackedAttention
from skyfleet.trainer.training_run import tuned_gc

N_NEW = 128
BATCHES = (1, 64, 512, 1024)
N_SHARED, N_SEQUENCES = 2048, 256
BYTES_A_SECOND = 4.3e12


class Generated(NamedTuple):
    token_ids: Sequence[int]
    logprobs: Sequence[float]


Generate = Callable[[Sequence[Sequence[int]], int], list[Generated]]
"""Prompts and a seed -> one completion per prompt, with empty caches."""


def prompts_of(n: int) -> list[list[int]]:
    """Of 24 tokens, all different."""
    return [[1000 + (i * 31 + j * 7) % 40_000 for j in range(24)] for i in range(n)]


def behind_one_prompt() -> list[list[int]]:
    shared = [(17 * i) % 100_000 for i in range(N_SHARED)]
    return [[*shared, i] for i in range(N_SEQUENCES)]


def timed(
    generate: Generate, prompts: Sequence[Sequence[int]], *, times: int = 3
) -> tuple[float, list[Generated]]:
    """The best time of several runs after a warm-up, and the completions of the last run."""
    best, completions = float("inf"), []
    with tuned_gc():  # as in `skyfleet train`, once everything is set up
        for seed in range(times + 1):
            torch.cuda.synchronize()
            start = perf_counter()
            completions = generate(prompts, seed)
            torch.cuda.synchronize()
            if seed:
                best = min(best, perf_counter() - start)
    assert all(len(one.token_ids) == N_NEW for one in completions)
    return best, completions


def embedded(decoder: Decoder, *, n: int, capacity: int) -> Generate:
    """Synchronises with the device as often as in `skyfleet train`."""
    engine = CudaEngine(
        decoder,
        decode_text=str,
        max_num_seqs=n,
        capacity=capacity,
        max_num_batched_tokens=16_384,
        memory_bytes=40 << 30,
    )

    async def all_of(prompts: Sequence[Sequence[int]], seed: int) -> list[Generated]:
        engine.policy_version = seed  # as after a step: pages of the last call are other weights'
        sampling = SamplingParams(max_generate_length=N_NEW, seed=seed)
        completions = await asyncio.gather(
            *(engine.generate(p, sampling, session=f"{i}") for i, p in enumerate(prompts))
        )
        return [Generated(c.token_ids, c.logprobs) for c in completions]

    return lambda prompts, seed: asyncio.run(all_of(prompts, seed))


def vllm(folder: Path, *, n: int, capacity: int, cache_gib: float, dummy: bool) -> Generate:
    """CUDA graphs for all n sequences, where vLLM by itself stops at 512."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    model = LLM(
        str(folder),
        dtype="bfloat16",
        max_model_len=capacity,
        max_num_seqs=n,
        gpu_memory_utilization=0.1,  # looked at only to see that so much is free
        kv_cache_memory_bytes=int(cache_gib * 2**30),
        compilation_config={"max_cudagraph_capture_size": n},
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        load_format="dummy" if dummy else "auto",
        disable_log_stats=True,
    )

    def generate(prompts: Sequence[Sequence[int]], seed: int) -> list[Generated]:
        assert model.reset_prefix_cache()
        params = VllmParams(max_tokens=N_NEW, ignore_eos=True, logprobs=0, detokenize=False)
        outputs = model.generate(
            [{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False
        )
        return [
            Generated(
                o.outputs[0].token_ids,
                [
                    step[token].logprob
                    for step, token in zip(
                        o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True
                    )
                ],
            )
            for o in outputs
        ]

    return generate


def transformers_generate(module: Any) -> Generate:
    def generate(prompts: Sequence[Sequence[int]], seed: int) -> list[Generated]:
        torch.manual_seed(seed)
        token_ids = torch.tensor(prompts, device="cuda")
        with torch.inference_mode():
            out = module.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                do_sample=True,
                top_k=0,  # it would leave out all but the 50 likeliest
                max_new_tokens=N_NEW,
                min_new_tokens=N_NEW,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=0,
            )
            scores_NKV = module.compute_transition_scores(
                out.sequences, out.scores, normalize_logits=True
            )
        new = out.sequences[:, token_ids.shape[1] :].tolist()
        return [Generated(t, s) for t, s in zip(new, scores_NKV.tolist(), strict=True)]

    return generate


def gap(
    decoder: Decoder, prompts: Sequence[Sequence[int]], completions: Sequence[Generated]
) -> dict[str, float]:
    """Between the logprobs that came with the tokens and those of a training forward, at most 64."""
    apart: list[torch.Tensor] = []
    some = list(zip(prompts, completions, strict=True))[:64]
    attention = PackedAttention([(*prompt, *one.token_ids) for prompt, one in some], decoder.device)
    with torch.no_grad():
        hidden_TE = decoder.hidden(attention.token_ids_T, attention.positions_T, attention)
        for row, (prompt, one) in enumerate(some):
            rows = attention.rows_BL[row, len(prompt) - 1 : len(prompt) + N_NEW - 1]
            logprobs_KV = torch.log_softmax(decoder.logits(hidden_TE[rows]), dim=-1)
            chosen = torch.tensor(one.token_ids, device=decoder.device)
            own = logprobs_KV.gather(1, chosen[:, None]).squeeze(1)
            apart.append((own.cpu() - torch.tensor(one.logprobs)).abs())
    every = torch.cat(apart)
    return {"gap_mean": round(float(every.mean()), 6), "gap_max": round(float(every.max()), 6)}


def smollm2(side: str, cache_gib: float) -> None:
    loaded = load_model(
        "smollm2", dtype=torch.bfloat16, device=torch.device("cuda"), config_kwargs={}
    )
    decoder = Decoder(loaded.module, max_positions=256)
    theirs: Generate | None = None
    if side == "vllm":
        with tempfile.TemporaryDirectory() as folder:
            save_model(loaded, Path(folder))
            theirs = vllm(
                Path(folder), n=BATCHES[-1], capacity=256, cache_gib=cache_gib, dummy=False
            )
    elif side == "generate":
        theirs = transformers_generate(loaded.module)
    for n in BATCHES:
        if side == "generate" and n > 512:
            continue
        generate = theirs or embedded(decoder, n=n, capacity=256)
        prompts = prompts_of(n)
        # A call of `generate` takes ten seconds, whatever the batch: one of them counts.
        seconds, completions = timed(generate, prompts, times=1 if side == "generate" else 3)
        row = {"side": side, "batch": n, "tokens_per_second": round(n * N_NEW / seconds)}
        print(json.dumps(row | (gap(decoder, prompts, completions) if n >= 64 else {})), flush=True)


def qwen3_8b(side: str, cache_gib: float) -> None:
    prompts, capacity = behind_one_prompt(), N_SHARED + 1 + N_NEW
    if side == "vllm":
        with tempfile.TemporaryDirectory() as folder:
            QWEN3_8B.architectures = ["Qwen3ForCausalLM"]
            QWEN3_8B.save_pretrained(folder)
            generate = vllm(
                Path(folder), n=N_SEQUENCES, capacity=capacity + 16, cache_gib=cache_gib, dummy=True
            )
    else:
        decoder = Decoder(model_of(QWEN3_8B), max_positions=capacity)
        generate = embedded(decoder, n=N_SEQUENCES, capacity=capacity)
    seconds, _ = timed(generate, prompts)
    # A step reads every weight but the embedding, the shared keys and values once, and each's own.
    weight_bytes = 2 * 7.57e9
    token_bytes = 2 * 2 * 36 * 8 * 128
    step = weight_bytes + token_bytes * (N_SHARED + N_SEQUENCES * N_NEW / 2)
    floor_seconds = N_NEW * step / BYTES_A_SECOND
    row = {
        "side": side,
        "case": "qwen3-8b shape, 256 behind one prompt of 2048",
        "tokens_per_second": round(N_SEQUENCES * N_NEW / seconds),
        "ms_a_step": round(seconds / N_NEW * 1e3, 2),
        "floor_ms_a_step": round(floor_seconds / N_NEW * 1e3, 2),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["embedded", "vllm", "generate"], required=True)
    parser.add_argument("--case", choices=["smollm2", "qwen3-8b"], default="smollm2")
    parser.add_argument("--cache-gib", type=float, default=20, help="vLLM's keys and values")
    options = parser.parse_args()
    (smollm2 if options.case == "smollm2" else qwen3_8b)(options.side, options.cache_gib)


if __name__ == "__main__":
    main()
