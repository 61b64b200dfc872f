"""On a GPU in bfloat16 engine and learner compute bit-identical logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from skyfleet.algorithms.sample import Sample
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.learner.batching import action_logprobs, pack
from skyfleet.models.decoder import Decoder
from skyfleet.models.packed import PackedAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
LONGEST = 640


def on_cuda(module: Any) -> Any:
    return module.to(device=CUDA, dtype=torch.bfloat16)


def llama() -> Any:
    """Large weights: attention is far from even, and a wrong bit shows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=5000, hidden_size=576, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=LONGEST,
        initializer_range=0.08,
    )  # fmt: skip
    return on_cuda(LlamaForCausalLM(config))


def qwen2() -> Any:
    """Its projections of queries, keys and values have biases, which transformers leaves at zero."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=5000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=LONGEST,
        initializer_range=0.08,
    )  # fmt: skip
    module = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return on_cuda(module)


def qwen3() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=5000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        max_position_embeddings=LONGEST, initializer_range=0.08,
    )  # fmt: skip
    return on_cuda(Qwen3ForCausalLM(config))


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_same_bits(make: Callable[[], Any], temperature: float) -> None:
    decoder = Decoder(make(), max_positions=LONGEST)
    engine = CudaEngine(decoder, decode_text=str, max_num_seqs=48, capacity=LONGEST)
    sampling = SamplingParams(max_generate_length=90, temperature=temperature, seed=3)
    # Twelve prompts of four attempts each: some longer than a tile, some shorter than a page.
    prompts = [[(7 * i + 3 * j) % 5000 for j in range(7 + 45 * i)] for i in range(12)]

    async def played() -> list[Sample]:
        async def one(index: int, attempt: int) -> Sample:
            prompt = prompts[index]
            completion = await engine.generate(prompt, sampling, session=f"{index}/{attempt}")
            n = len(completion.token_ids)
            return Sample(
                task_key=str(index),
                env_key="random",
                token_ids=(*prompt, *completion.token_ids),
                loss_mask=(False,) * len(prompt) + (True,) * n,
                logprobs=(0.0,) * len(prompt) + completion.logprobs,
                advantages=(0.0,) * (len(prompt) + n),
                policy_version=0,
            )

        return list(await asyncio.gather(*(one(i, k) for i in range(12) for k in range(4))))

    # The second time by the same graphs, under weights that changed in place.
    for version in (0, 1):
        engine.policy_version = version
        samples = asyncio.run(played())
        for budget in (2_000, 100_000):
            for batch in pack(samples, [1.0] * len(samples), max_tokens=budget, device=CUDA):
                with torch.no_grad():
                    logprobs_N, _ = action_logprobs(decoder, batch, temperature=temperature)
                assert torch.equal(logprobs_N, batch.behaviour_logprobs_N)
        with torch.no_grad():
            for parameter in decoder.module.parameters():
                parameter.mul_(1.05)
    assert engine._prefill._graphs
    assert engine._slots._graphs


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
def test_chunked_prefill_gives_the_same_bits(
    make: Callable[[], Any],
) -> None:
    """33 and 333 cut prompts anywhere, 8,192 fills the largest graph, 40,000 goes without one."""
    decoder = Decoder(make(), max_positions=LONGEST)
    sampling = SamplingParams(max_generate_length=12, seed=5)
    prompts = [[(11 * i + 5 * j) % 5000 for j in range(1 + 12 * i)] for i in range(48)]

    async def answers(engine: CudaEngine) -> list[Any]:
        asked = [engine.generate(p, sampling, session=str(i)) for i, p in enumerate(prompts)]
        return [(c.token_ids, c.logprobs) for c in await asyncio.gather(*asked)]

    given = []
    for budget in (8_192, 33, 333, 40_000):
        engine = CudaEngine(
            decoder,
            decode_text=str,
            max_num_seqs=48,
            capacity=LONGEST,
            max_num_batched_tokens=budget,
        )
        given.append(asyncio.run(answers(engine)))
        assert bool(engine._prefill._graphs) == (budget <= 8_192)
    assert all(one == given[0] for one in given)


def test_gradients_of_packed_attention_are_those_of_plain_float32() -> None:
    torch.manual_seed(0)
    sequences = [tuple(range(300)), (*range(200), 999, 998), (7, 8, 9)]
    packed = PackedAttention(sequences, CUDA)
    n = len(packed.token_ids_T)
    coarse = [torch.randn(n, heads, 64, device=CUDA).bfloat16() for heads in (9, 3, 3)]
    upstream = torch.randn(n, 9, 64, device=CUDA)

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in coarse]
        out = packed(0, *inputs)
        return list(torch.autograd.grad((out.float() * upstream).sum(), inputs))

    for one, other in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        apart = (one.float() - other).norm() / other.norm()
        assert apart < 0.02
