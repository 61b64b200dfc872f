"""Random models of a few thousand weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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

from skyfleet.models.decoder import Decoder
from skyfleet.models.packed import PackedAttention

VOCABULARY = 64

DIMENSIONS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": 0,
    "initializer_range": 0.3,
}
"""Weights are large, so that a wrong logit is far from the right one."""


def seeded(build: type, config: object, *, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(config)


def llama() -> Any:
    return seeded(LlamaForCausalLM, LlamaConfig(**DIMENSIONS), seed=1)


def qwen2() -> Any:
    """Its projections of queries, keys and values have biases, which transformers leaves at zero."""
    module = seeded(Qwen2ForCausalLM, Qwen2Config(**DIMENSIONS), seed=1)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=drawn)
    return module


def qwen3() -> Any:
    """Its queries and keys are normed."""
    return seeded(Qwen3ForCausalLM, Qwen3Config(**DIMENSIONS, head_dim=8), seed=1)


def small_decoder(*, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    config = Qwen3Config(**{**DIMENSIONS, "head_dim": 8, "tie_word_embeddings": True, **changes})
    module = seeded(Qwen3ForCausalLM, config, seed=seed).to(dtype=dtype)
    return Decoder(module, max_positions=config.max_position_embeddings)


def logits_of(decoder: Decoder, sequence: Sequence[int]) -> Tensor:
    """A fresh forward pass over one sequence: [T, V]."""
    attend = PackedAttention([tuple(sequence)], decoder.device)
    return decoder.logits(decoder.hidden(attend.token_ids_T, attend.positions_T, attend))


def logprobs_of(
    decoder: Decoder, sequence: Sequence[int], n_last: int, *, temperature: float = 1.0
) -> Tensor:
    """What a fresh forward pass thinks of the last `n_last` tokens."""
    with torch.no_grad():
        scores_TV = torch.log_softmax(logits_of(decoder, sequence) / temperature, dim=-1)
    targets = torch.tensor(sequence[-n_last:])
    return scores_TV[-n_last - 1 : -1].gather(1, targets.unsqueeze(1)).squeeze(1)
