"""Fingerprint: one exact number sequence for a model's weights; any changed bit changes it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCKS = 8
"""Sums a tensor: one alone would not tell whether halves were swapped."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Weights = Mapping[str, Tensor]


def weights_of(holder: object) -> Weights | None:
    """Of an engine or a learner in this process; None where the weights are elsewhere."""
    decoder = getattr(holder, "_decoder", None)
    return None if decoder is None else dict(decoder.module.named_parameters())


@torch.no_grad()
def fingerprint(weights: Weights) -> Tensor:
    """Sums of the bits, a row a tensor, on the CPU."""
    return torch.stack([_sums(weight) for weight in weights.values()]).cpu()


@torch.no_grad()
def differing(ours: Weights, theirs: Weights) -> list[str]:
    """Names whose tensors are not the same, adapters included. Shared storage is not read."""
    absent = ours.keys() ^ theirs.keys()
    odd = [name for name in ours if name in theirs and not _same(ours[name], theirs[name])]
    return sorted([*absent, *odd])


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    if ours.data_ptr() == theirs.data_ptr() and ours.dtype == theirs.dtype:
        return True
    return bool(_sums(ours.to(theirs.dtype)).cpu().equal(_sums(theirs).cpu()))


def _sums(weight: Tensor) -> Tensor:
    bits = weight.detach().contiguous().view(BITS[weight.element_size()]).flatten()
    if len(bits) % BLOCKS:
        return bits.sum(dtype=torch.int64).repeat(BLOCKS)
    return bits.view(BLOCKS, -1).sum(dim=1, dtype=torch.int64)
