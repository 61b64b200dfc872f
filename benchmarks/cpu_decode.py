"""Tokens decoded a CPU-second, SmolLM2-135M in float32: our engine beside `transformers.generate`.

The same weights and prompts, 64 new tokens a sequence with their logprobs, drawn at temperature 1;
the end of a turn is ignored by the engine and kept from being drawn by `generate`. Prompts have one
length, so neither side pads, and each is its own: nothing is shared. The time is that of a whole
call, prompts read included; the median of a few calls after one that does not count. One torch
thread, `time.process_time` of the whole process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from platform import machine, python_version, system
from statistics import median
from time import process_time
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1"}

import torch

from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import load_model

PROMPT_LENGTH, NEW = 32, 64
BATCHES = (1, 8, 32)


def prompts_of(batch: int, vocab_size: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(17)
    return torch.randint(100, vocab_size, (batch, PROMPT_LENGTH), generator=drawn).tolist()


def with_engine(decoder: Decoder, prompts: list[list[int]]) -> None:
    engine = EmbeddedEngine(
        decoder,
        decode_text=str,
        max_num_seqs=len(prompts),
        capacity=PROMPT_LENGTH + NEW,
    )
    sampling = SamplingParams(max_generate_length=NEW, seed=17)

    async def generate() -> None:
        completions = await asyncio.gather(
            *(engine.generate(p, sampling, session=str(i)) for i, p in enumerate(prompts))
        )
        assert all(len(completion.logprobs) == NEW for completion in completions)

    asyncio.run(generate())


def with_generate(module: Any, prompts: list[list[int]]) -> None:
    """As a trainer would: sampled, with the logits kept and turned into logprobs of what was drawn."""
    prompts_BT = torch.tensor(prompts)
    output = module.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs_BT = module.compute_transition_scores(
        output.sequences, output.logits, normalize_logits=True
    )
    assert logprobs_BT.shape == (len(prompts), NEW)


def tokens_a_second(call: Callable[[], None], batch: int, calls: int) -> float:
    seconds: list[float] = []
    for _ in range(calls + 1):
        start = process_time()
        call()
        seconds.append(process_time() - start)
    return batch * NEW / median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=3, help="measured calls; the median counts")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    module: Any = load_model("smollm2", dtype=torch.float32, device=device, config_kwargs={}).module
    decoder = Decoder(module.eval(), max_positions=PROMPT_LENGTH + NEW)
    rows = []
    for batch in chosen.batches:
        prompts = prompts_of(batch, decoder.vocab_size)
        ours = tokens_a_second(partial(with_engine, decoder, prompts), batch, chosen.calls)
        theirs = tokens_a_second(partial(with_generate, module, prompts), batch, chosen.calls)
        rows.append(f"| {batch} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |")
    print(
        f"`python benchmarks/cpu_decode.py --calls {chosen.calls}` on {date.today()}: {system()} "
        f"{machine()},\nPython {python_version()}, torch {version('torch')}, "
        f"transformers {version('transformers')}.\n"
    )
    print("| sequences at once | EmbeddedEngine | `transformers.generate` | ratio |")
    print("|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
