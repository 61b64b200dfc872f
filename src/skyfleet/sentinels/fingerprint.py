"""Fingerprint: a checksum of a model's weights that changes with any changed bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skyfleet.engines.engine import HasDecoder
from skyfleet.models.decoder import Decoder
from skyfleet.models.lora import merged_state_dict
from skyfleet.models.weights import weight_checksum, weight_checksums

MAX_STACKED_BYTES = 1 << 28
"""Largest copy of equally shaped tensors."""

Weights = Mapping[str, Tensor]


def find_decoder(holder: object) -> Decoder | None:
    """The decoder of an engine or a learner; None if its weights are in another process."""
    return holder.decoder if isinstance(holder, HasDecoder) else None


def find_weights(holder: object) -> Weights | None:
    decoder = find_decoder(holder)
    return None if decoder is None else dict(decoder.module.named_parameters())


def find_whole_weights(holder: object) -> Weights | None:
    """As an engine uses them, by the names under which they are synced."""
    decoder = find_decoder(holder)
    return None if decoder is None else merged_state_dict(decoder.module)


@torch.no_grad()
def fingerprint(weights: Weights) -> Tensor:
    """Sums of the bits, one row per tensor, on the CPU."""
    alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for weight in weights.values():
        alike.setdefault((weight.shape, weight.dtype), []).append(weight)
    rows = [_rows(same) for same in alike.values()]
    return torch.cat(rows).cpu()


def _rows(same: Sequence[Tensor]) -> Tensor:
    """A model has hundreds of tensors of ten shapes, and one kernel per small tensor is slow."""
    if same[0].nbytes * len(same) > MAX_STACKED_BYTES:
        return torch.stack([weight_checksum(weight) for weight in same])
    return weight_checksums(torch.stack(list(same)))


@torch.no_grad()
def find_differences(ours: Weights, theirs: Weights) -> list[str]:
    """Names of tensors that differ, adapters included. Shared storage is not read."""
    missing = ours.keys() ^ theirs.keys()
    different = [name for name in ours if name in theirs and not _same(ours[name], theirs[name])]
    return sorted([*missing, *different])


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    if ours.data_ptr() == theirs.data_ptr() and ours.dtype == theirs.dtype:
        return True
    return bool(weight_checksum(ours.to(theirs.dtype)).cpu().equal(weight_checksum(theirs).cpu()))
