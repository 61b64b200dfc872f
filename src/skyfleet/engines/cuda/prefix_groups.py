"""Prefix groups for cascade attention: sequences with a common prefix read its keys together.

Attempts at one task share its prompt, and all tasks of an environment share its tools. One read
serves the whole group, so the shared prefix costs little more than its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyfleet.engines.cuda.cuda_graphs import copy_to_device
from skyfleet.engines.prefix_cache import BLOCK_SIZE
from skyfleet.models.fused.head_layout import KEY_BLOCK

GROUP_SIZE = 16
"""Sequences per group; together with their heads they fill one tensor-core tile."""
_MIN_SHARED_TOKENS = 2 * KEY_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroups:
    """Device tensors that describe the groups of one batch, and the partial attention of their
    prefixes."""

    members_SZ: Tensor
    """Slots of each group, -1 for an empty place. There are as many groups as slots."""
    group_shared_len_S: Tensor
    """Tokens that the members of each group share; 0 for an unused group."""
    shared_len_S: Tensor
    """Tokens of each slot that its group's pass covers. Always a multiple of `KEY_BLOCK`, so that
    nothing is summed in another order."""
    lse_max_SH: Tensor
    lse_sum_SH: Tensor
    out_SHD: Tensor
    """Running maximum, sum and unnormalised output of the online softmax over the shared prefix."""

    @classmethod
    def allocate(
        cls, n_slots: int, n_heads: int, head_dim: int, device: torch.device
    ) -> PrefixGroups:
        return cls(
            members_SZ=torch.full((n_slots, GROUP_SIZE), -1, dtype=torch.int32, device=device),
            group_shared_len_S=torch.zeros(n_slots, dtype=torch.int32, device=device),
            shared_len_S=torch.zeros(n_slots, dtype=torch.int32, device=device),
            lse_max_SH=torch.zeros(n_slots, n_heads, device=device),
            lse_sum_SH=torch.zeros(n_slots, n_heads, device=device),
            out_SHD=torch.zeros(n_slots, n_heads, head_dim, device=device),
        )

    def update(self, block_table: np.ndarray, lengths: dict[int, int]) -> bool:
        """Group the slots in `lengths` (slot -> computed tokens) by prefix.

        False if none share one.
        """
        members = np.full(tuple(self.members_SZ.shape), -1, dtype=np.int32)
        group_shared_len = np.zeros(len(members), dtype=np.int32)
        shared_len = np.zeros(len(members), dtype=np.int32)
        for number, (slots, n_tokens) in enumerate(_find_groups(block_table, lengths)):
            if len(slots) > 1:
                members[number, : len(slots)] = slots
                group_shared_len[number] = shared_len[slots] = n_tokens
        if not group_shared_len.any():
            return False
        for target, values in (
            (self.members_SZ, members),
            (self.group_shared_len_S, group_shared_len),
            (self.shared_len_S, shared_len),
        ):
            target.copy_(copy_to_device(values, target.device))
        return True


def _find_groups(
    block_table: np.ndarray, lengths: dict[int, int]
) -> Iterator[tuple[list[int], int]]:
    """Yield slots and the number of tokens they share, from a greedy pass over sorted block
    tables."""
    # Sequences below the minimum would only shorten the prefix of their group.
    long = (slot for slot, n_tokens in lengths.items() if n_tokens >= _MIN_SHARED_TOKENS)
    # Sorted by their blocks, the sequences that share most are neighbours.
    order = sorted(long, key=lambda slot: block_table[slot].tobytes())
    if not order:
        return
    slots: list[int] = []
    n_blocks = n_tokens = 0
    for slot, n_common in zip(order, _count_common_blocks(block_table[order]), strict=True):
        # The prefix shared with the group's first member is the minimum over all neighbours since.
        n_blocks = min(n_blocks, n_common)
        common = min(n_blocks * BLOCK_SIZE, lengths[slot]) // KEY_BLOCK * KEY_BLOCK
        # Add a member as long as the others lose fewer shared tokens than it gains.
        gains = common >= _MIN_SHARED_TOKENS and common * len(slots) >= n_tokens * (len(slots) - 1)
        if 0 < len(slots) < GROUP_SIZE and gains:
            slots.append(slot)
            n_tokens = min(n_tokens, common)
            continue
        if slots:
            yield slots, n_tokens
        slots, n_blocks = [slot], block_table.shape[1]
        n_tokens = lengths[slot] // KEY_BLOCK * KEY_BLOCK
    if slots:
        yield slots, n_tokens


def _count_common_blocks(rows: np.ndarray) -> list[int]:
    """For each row, the number of leading blocks it has in common with the row before.

    0 for the first.
    """
    differs = rows[1:] != rows[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), rows.shape[1])
    return [0, *common.tolist()]
