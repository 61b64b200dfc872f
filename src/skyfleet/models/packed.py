"""Packed attention: whole sequences laid end to end, what they begin with in common only once.

A token's place in the network depends on the tokens before it and nothing else, so sequences with
the same beginning share its rows: the prompt of a group is computed once, and its gradient is the
sum over the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention


class PackedAttention:
    """Causal attention inside each sequence of a pack; sequences do not see each other."""

    def __init__(self, sequences: Sequence[tuple[int, ...]], device: torch.device) -> None:
        width = max(map(len, sequences))
        rows = [[0] * width for _ in sequences]
        owners: list[int] = []
        """Which padded cell computes each packed row."""
        token_ids: list[int] = []
        positions: list[int] = []
        # In sorted order a sequence shares most with the one just before it.
        order = sorted(range(len(sequences)), key=lambda i: sequences[i])
        before: int | None = None
        for i in order:
            shared = 0 if before is None else _shared(sequences[before], sequences[i])
            fresh = range(len(token_ids), len(token_ids) + len(sequences[i]) - shared)
            kept = [] if before is None else rows[before][:shared]
            # A padded cell repeats a real token: causality keeps it out of every real answer.
            padding = [fresh[-1] if fresh else kept[-1]] * (width - len(sequences[i]))
            rows[i] = [*kept, *fresh, *padding]
            owners.extend(i * width + p for p in range(shared, len(sequences[i])))
            positions.extend(range(shared, len(sequences[i])))
            token_ids.extend(sequences[i][shared:])
            before = i
        self.rows_BL = torch.tensor(rows, device=device)
        """Where in T each token of each sequence stands."""
        self._owners_T = torch.tensor(owners, device=device)
        self.token_ids_T = torch.tensor(token_ids, device=device)
        self.positions_T = torch.tensor(positions, device=device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out_BHLD = scaled_dot_product_attention(
            self._padded(q_THD),
            self._padded(k_TKD),
            self._padded(v_TKD),
            is_causal=True,
            enable_gqa=q_THD.shape[1] != k_TKD.shape[1],
        )
        return take_rows(out_BHLD.transpose(1, 2).flatten(0, 1), self._owners_T)

    def _padded(self, x_THD: Tensor) -> Tensor:
        return take_rows(x_THD, self.rows_BL).transpose(1, 2)


def flash_varlen(
    q_THD: Tensor,
    k_LKD: Tensor,
    v_LKD: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    max_q: int,
    max_k: int,
) -> Tensor:
    """Causal attention of sequences laid end to end, without padding; 16-bit types on CUDA.

    `q_ends` and `k_ends` are where each sequence ends, after a leading 0. A sequence with more
    keys than queries is read from its end: the last query sees every key.
    """
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q_THD, k_LKD, v_LKD, q_ends, k_ends, max_q, max_k, 0.0, True, False
    )[0]
    return out


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]`, whose gradient is the same sum in the same order every time.

    Indexing adds gradients up from several threads at once, in whatever order they come.
    """
    taken = embedding(rows, x.reshape(len(x), -1))
    return taken.view(*rows.shape, *x.shape[1:])


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    for n, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return n
    return min(len(a), len(b))
