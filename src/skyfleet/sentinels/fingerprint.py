"""Fingerprint: one exact number sequence for a model's weights; any changed bit changes it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from skyfleet.models.bit_sums import bit_sums

Weights = Mapping[str, Tensor]


def weights_of(holder: object) -> Weights | None:
    """Of an engine or a learner in this process; None where the weights are elsewhere."""
    decoder = getattr(holder, "_decoder", None)
    return None if decoder is None else dict(decoder.module.named_parameters())


@torch.no_grad()
def fingerprint(weights: Weights) -> Tensor:
    """Sums of the bits, a row a tensor, on the CPU."""
    return torch.stack([bit_sums(weight) for weight in weights.values()]).cpu()


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
    return bool(bit_sums(ours.to(theirs.dtype)).cpu().equal(bit_sums(theirs).cpu()))
