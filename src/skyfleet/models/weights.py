"""Checksums of weight tensors, and the sizes of a model from its configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

N_BLOCKS = 8
"""Sums per tensor: a single sum would not change if two halves were swapped."""
INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that hold the bits of a weight, by its bytes per element."""


def weight_checksum(weight: Tensor) -> Tensor:
    """Checksum of a tensor: the sums of its bit patterns, as integers, over `N_BLOCKS` blocks."""
    return weight_checksums(weight.unsqueeze(0))[0]


def weight_checksums(weights_B: Tensor) -> Tensor:
    """Checksums of stacked tensors, one row per tensor."""
    bits = weights_B.detach().contiguous().view(INT_DTYPES[weights_B.element_size()])
    bits = bits.reshape(len(bits), -1)
    if bits.shape[1] % N_BLOCKS:
        return bits.sum(dim=1, keepdim=True, dtype=torch.int64).repeat(1, N_BLOCKS)
    return bits.view(len(bits), N_BLOCKS, -1).sum(dim=2, dtype=torch.int64)


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


def read_model_sizes(config: Any) -> dict[str, Any]:
    """Sizes by Hugging Face's names, as far as the configuration has them."""
    sizes = {name: getattr(config, name, None) for name in _SIZES}
    return {name: value for name, value in sizes.items() if value is not None}
