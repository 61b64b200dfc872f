"""Sums of a tensor's bits: equal tensors have equal ones, wherever they are computed."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = 8
"""Sums a tensor: one alone would not tell whether halves were swapped."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sums(weight: Tensor) -> Tensor:
    bits = weight.detach().contiguous().view(BITS[weight.element_size()]).flatten()
    if len(bits) % BLOCKS:
        return bits.sum(dtype=torch.int64).repeat(BLOCKS)
    return bits.view(BLOCKS, -1).sum(dim=1, dtype=torch.int64)
