"""Sums of a tensor's bits: equal tensors have equal ones, wherever they are computed."""

from __future__ import annotations

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
