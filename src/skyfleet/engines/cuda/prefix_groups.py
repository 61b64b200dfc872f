"""Kin: sequences that begin with the same pages, whose queries meet those keys together.

Attempts at a task share its prompt, and all tasks of a world its tools. Read once for many, the
shared part costs little more than its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyfleet.engines.cuda.block_pool import PAGE
from skyfleet.engines.cuda.cuda_graphs import moved
from skyfleet.models.fused.shapes import KEY_BLOCK

SEATS = 16
"""Sequences that meet keys together; with their heads they fill what a tensor core takes at once."""
STEP = KEY_BLOCK
"""Tokens: whole blocks of keys are shared, so that nothing is summed in another order."""
_LEAST = 2 * STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Kin:
    members_SZ: Tensor
    """Slots of each cluster, the first of them real; -1 is nobody. There are as many as slots."""
    shared_S: Tensor
    """Tokens that the members of each cluster share; 0: the cluster is none."""
    met_S: Tensor
    """Tokens that each slot's queries have met with its cluster."""
    most_SH: Tensor
    total_SH: Tensor
    out_SHD: Tensor
    """What each query took from them so far."""

    @classmethod
    def among(cls, n_slots: int, n_heads: int, width: int, device: torch.device) -> Kin:
        return cls(
            members_SZ=torch.full((n_slots, SEATS), -1, dtype=torch.int32, device=device),
            shared_S=torch.zeros(n_slots, dtype=torch.int32, device=device),
            met_S=torch.zeros(n_slots, dtype=torch.int32, device=device),
            most_SH=torch.zeros(n_slots, n_heads, device=device),
            total_SH=torch.zeros(n_slots, n_heads, device=device),
            out_SHD=torch.zeros(n_slots, n_heads, width, device=device),
        )

    def gather(self, table: np.ndarray, lengths: dict[int, int]) -> bool:
        """Find who shares what among slots with so many tokens computed; False: nobody does."""
        members = np.full(tuple(self.members_SZ.shape), -1, dtype=np.int32)
        shared = np.zeros(len(members), dtype=np.int32)
        met = np.zeros(len(members), dtype=np.int32)
        for number, (slots, n_tokens) in enumerate(_clusters(table, lengths)):
            if len(slots) > 1:
                members[number, : len(slots)] = slots
                shared[number] = met[slots] = n_tokens
        if not shared.any():
            return False
        for target, values in (
            (self.members_SZ, members),
            (self.shared_S, shared),
            (self.met_S, met),
        ):
            target.copy_(moved(values, target.device))
        return True


def _clusters(table: np.ndarray, lengths: dict[int, int]) -> Iterator[tuple[list[int], int]]:
    """Slots, and the tokens they share. In the order of their pages those are neighbours who share most."""
    # A cluster has no room for who is shorter than the least that is shared.
    long = (slot for slot, n_tokens in lengths.items() if n_tokens >= _LEAST)
    order = sorted(long, key=lambda slot: table[slot].tobytes())
    if not order:
        return
    slots: list[int] = []
    n_pages = n_tokens = 0
    for slot, n_like_before in zip(order, _pages_like_before(table[order]), strict=True):
        # What is alike with the first is what is alike all the way from it.
        n_pages = min(n_pages, n_like_before)
        common = min(n_pages * PAGE, lengths[slot]) // STEP * STEP
        # One more member is welcome as long as the others lose less than it gains.
        gains = common >= _LEAST and common * len(slots) >= n_tokens * (len(slots) - 1)
        if 0 < len(slots) < SEATS and gains:
            slots.append(slot)
            n_tokens = min(n_tokens, common)
            continue
        if slots:
            yield slots, n_tokens
        slots, n_pages, n_tokens = [slot], table.shape[1], lengths[slot] // STEP * STEP
    if slots:
        yield slots, n_tokens


def _pages_like_before(rows: np.ndarray) -> list[int]:
    """How many pages each row begins with in common with the one before it; none for the first."""
    differs = rows[1:] != rows[:-1]
    alike = np.where(differs.any(axis=1), differs.argmax(axis=1), rows.shape[1])
    return [0, *alike.tolist()]
