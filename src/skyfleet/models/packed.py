"""Packed attention: sequences packed end to end, with shared prefixes computed only once.

A token depends only on the tokens before it, so sequences with a common prefix share its rows: the
prompt of a group is computed once, and its gradient is the sum over the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import compress, count
from operator import ne

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from skyfleet.models.fused.flash_attention import (
    HEAD_DIMS,
    CuSeqlens,
    SharedRows,
    cumulative_lengths,
    flash_varlen,
    gather_shared_rows,
)


class PackedAttention:
    """Causal attention inside each sequence of a pack; sequences do not see each other."""

    def __init__(self, sequences: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self._device = device
        width = max(map(len, sequences))
        self._lengths = [len(sequence) for sequence in sequences]
        rows_BL = np.zeros((len(sequences), width), dtype=np.int64)
        # In sorted order, a sequence shares its longest prefix with the one before it.
        self._order = sorted(range(len(sequences)), key=lambda i: sequences[i])
        self._n_own = [0] * len(sequences)
        """Tokens at the end of each sequence that it does not share with the one before."""
        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        owners: list[np.ndarray] = []
        before: int | None = None
        n_rows = 0
        for i in self._order:
            n = self._lengths[i]
            shared = 0 if before is None else _common_prefix(sequences[before], sequences[i])
            self._n_own[i] = n - shared
            if before is not None:
                rows_BL[i, :shared] = rows_BL[before, :shared]
            rows_BL[i, shared:n] = np.arange(n_rows, n_rows + n - shared)
            # Padding repeats a real token; the causal mask hides it from all real tokens.
            rows_BL[i, n:] = rows_BL[i, n - 1]
            tokens.append(np.asarray(sequences[i][shared:], dtype=np.int64))
            positions.append(np.arange(shared, n))
            owners.append(i * width + np.arange(shared, n))
            n_rows, before = n_rows + n - shared, i
        self._rows_BL, self._owners, self._n_rows = rows_BL, owners, n_rows
        self.rows_BL = self._to_device(rows_BL)
        """Index in T of each token of each sequence."""
        self.token_ids_T = self._to_device(np.concatenate(tokens))
        self.positions_T = self._to_device(np.concatenate(positions))

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if q_THD.is_cuda and q_THD.dtype != torch.float32 and q_THD.shape[-1] in HEAD_DIMS:
            return self._flash(q_THD, k_TKD, v_TKD)
        out_BHLD = scaled_dot_product_attention(
            self._padded(q_THD),
            self._padded(k_TKD),
            self._padded(v_TKD),
            is_causal=True,
            enable_gqa=q_THD.shape[1] != k_TKD.shape[1],
        )
        return take_rows(out_BHLD.transpose(1, 2).flatten(0, 1), self._owning_cells)

    def _flash(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Without padding: the queries of a sequence are its own tokens, the keys are all its
        tokens."""
        cu_seqlens, shared = self._flash_layout
        if shared is not None:
            k_TKD = gather_shared_rows(k_TKD, shared)
            v_TKD = gather_shared_rows(v_TKD, shared)
        return flash_varlen(q_THD, k_TKD, v_TKD, cu_seqlens)

    def _padded(self, x_THD: Tensor) -> Tensor:
        return take_rows(x_THD, self.rows_BL).transpose(1, 2)

    @cached_property
    def _owning_cells(self) -> Tensor:
        """Index of the padded cell that computes each packed row."""
        return self._to_device(np.concatenate(self._owners))

    @cached_property
    def _flash_layout(self) -> tuple[CuSeqlens, SharedRows | None]:
        computed = [i for i in self._order if self._n_own[i]]
        n_own = np.asarray([self._n_own[i] for i in computed])
        lengths = np.asarray([self._lengths[i] for i in computed])
        cu_seqlens = CuSeqlens.from_lengths(n_own, lengths, self._device)
        if lengths.sum() == self._n_rows:
            return cu_seqlens, None
        rows = np.concatenate([self._rows_BL[i, : self._lengths[i]] for i in computed])
        shared = SharedRows(
            rows_L=self._to_device(rows),
            starts_R=self._to_device(cumulative_lengths(np.bincount(rows, minlength=self._n_rows))),
            places_L=self._to_device(np.argsort(rows, kind="stable")),
        )
        return cu_seqlens, shared

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]` with a deterministic gradient.

    Plain indexing sums gradients from several threads in an arbitrary order.
    """
    taken = embedding(rows, x.reshape(len(x), -1))
    return taken.view(*rows.shape, *x.shape[1:])


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))
