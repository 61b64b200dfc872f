"""Fingerprint: one exact number sequence for a model's weights; any changed bit changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skyfleet.models.weights import bit_sums, bit_sums_of_each

AT_ONCE_BYTES = 1 << 28
"""Copied side by side at most."""

Weights = Mapping[str, Tensor]


def weights_of(holder: object) -> Weights | None:
    """Of an engine or a learner in this process; None where the weights are elsewhere."""
    decoder = getattr(holder, "_decoder", None)
    return None if decoder is None else dict(decoder.module.named_parameters())


@torch.no_grad()
def fingerprint(weights: Weights) -> Tensor:
    """Sums of the bits, a row a tensor, on the CPU."""
    alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for weight in weights.values():
        alike.setdefault((weight.shape, weight.dtype), []).append(weight)
    rows = [_rows(same) for same in alike.values()]
    return torch.cat(rows).cpu()


def _rows(same: Sequence[Tensor]) -> Tensor:
    """A model has hundreds of tensors of ten shapes: asked one by one, small ones keep a GPU waiting."""
    if same[0].nbytes * len(same) > AT_ONCE_BYTES:
        return torch.stack([bit_sums(weight) for weight in same])
    return bit_sums_of_each(torch.stack(list(same)))


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
