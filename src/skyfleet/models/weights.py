"""Checksums and shapes of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCKS = 8
"""Sums a tensor: one alone would not tell whether halves were swapped."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sums(weight: Tensor) -> Tensor:
    return bit_sums_of_each(weight.unsqueeze(0))[0]


def bit_sums_of_each(weights_B: Tensor) -> Tensor:
    """Of tensors that lie in one, a row for each."""
    bits = weights_B.detach().contiguous().view(BITS[weights_B.element_size()])
    bits = bits.reshape(len(bits), -1)
    if bits.shape[1] % BLOCKS:
        return bits.sum(dim=1, keepdim=True, dtype=torch.int64).repeat(1, BLOCKS)
    return bits.view(len(bits), BLOCKS, -1).sum(dim=2, dtype=torch.int64)


_SIZES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)


def sizes_of(config: Any) -> dict[str, Any]:
    """By Hugging Face's names, as far as a configuration has them."""
    named = {name: getattr(config, name, None) for name in _SIZES}
    return {name: value for name, value in named.items() if value is not None}
