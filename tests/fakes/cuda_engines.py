"""A CUDA engine over a small model, and many concurrent requests to it."""

from __future__ import annotations

import asyncio

from tests.fakes.small_models import small_decoder

from skyfleet.chat.transcript import Completion
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.models.decoder import Decoder

PROMPT = [(7 * i) % 61 for i in range(40)]
SAMPLING = SamplingParams(max_generate_length=12, temperature=0.8, seed=1)


def engine(decoder: Decoder | None = None, **settings: int) -> CudaEngine:
    return CudaEngine(
        decoder or small_decoder(),
        decode_text=lambda token_ids: "".join(chr(32 + token) for token in token_ids),
        **({"max_num_seqs": 8, "capacity": 160, "steps_per_round": 4} | settings),  # type: ignore[arg-type]
    )


async def crowd(
    policy_model: CudaEngine | EmbeddedEngine, sampling: SamplingParams
) -> list[Completion]:
    """Twelve prompts, half of which begin alike, through eight slots."""
    prompts = [PROMPT + [n] * n if n % 2 else PROMPT[n:] for n in range(12)]
    return await asyncio.gather(
        *(policy_model.generate(p, sampling, session=f"s{n}") for n, p in enumerate(prompts))
    )


def page_bytes(decoder: Decoder) -> int:
    """Of float32."""
    return 16 * decoder.n_layers * 2 * decoder.n_kv_heads * decoder.head_dim * 4
