"""Packed attention: whole sequences laid end to end, what they begin with in common only once.

A token's place in the network depends on the tokens before it and nothing else, so sequences with
the same beginning share its rows: the prompt of a group is computed once, and its gradient is the
sum over the group.
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

from skyfleet.models.fused.flash import (
    WIDTHS,
    Ends,
    SharedRows,
    flash_varlen,
    running_ends,
    take_shared,
)


class PackedAttention:
    """Causal attention inside each sequence of a pack; sequences do not see each other."""

    def __init__(self, sequences: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self._device = device
        width = max(map(len, sequences))
        self._lengths = [len(sequence) for sequence in sequences]
        rows_BL = np.zeros((len(sequences), width), dtype=np.int64)
        # In sorted order a sequence shares most with the one just before it.
        self._order = sorted(range(len(sequences)), key=lambda i: sequences[i])
        self._fresh = [0] * len(sequences)
        """How many of a sequence's last tokens are nobody's before it."""
        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        owners: list[np.ndarray] = []
        before: int | None = None
        n_rows = 0
        for i in self._order:
            n = self._lengths[i]
            shared = 0 if before is None else _shared(sequences[before], sequences[i])
            self._fresh[i] = n - shared
            if before is not None:
                rows_BL[i, :shared] = rows_BL[before, :shared]
            rows_BL[i, shared:n] = np.arange(n_rows, n_rows + n - shared)
            # A padded cell repeats a real token: causality keeps it out of every real answer.
            rows_BL[i, n:] = rows_BL[i, n - 1]
            tokens.append(np.asarray(sequences[i][shared:], dtype=np.int64))
            positions.append(np.arange(shared, n))
            owners.append(i * width + np.arange(shared, n))
            n_rows, before = n_rows + n - shared, i
        self._rows_BL, self._owners, self._n_rows = rows_BL, owners, n_rows
        self.rows_BL = self._moved(rows_BL)
        """Where in T each token of each sequence stands."""
        self.token_ids_T = self._moved(np.concatenate(tokens))
        self.positions_T = self._moved(np.concatenate(positions))

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if q_THD.is_cuda and q_THD.dtype != torch.float32 and q_THD.shape[-1] in WIDTHS:
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
        """Nobody's padding: a sequence asks with its fresh tokens and is answered by all of its own."""
        ends, shared = self._places
        if shared is not None:
            k_TKD, v_TKD = take_shared(k_TKD, shared), take_shared(v_TKD, shared)
        return flash_varlen(q_THD, k_TKD, v_TKD, ends)

    def _padded(self, x_THD: Tensor) -> Tensor:
        return take_rows(x_THD, self.rows_BL).transpose(1, 2)

    @cached_property
    def _owning_cells(self) -> Tensor:
        """Which padded cell computes each packed row."""
        return self._moved(np.concatenate(self._owners))

    @cached_property
    def _places(self) -> tuple[Ends, SharedRows | None]:
        asking = [i for i in self._order if self._fresh[i]]
        fresh = np.asarray([self._fresh[i] for i in asking])
        lengths = np.asarray([self._lengths[i] for i in asking])
        ends = Ends.of(fresh, lengths, self._device)
        if lengths.sum() == self._n_rows:
            return ends, None
        rows = np.concatenate([self._rows_BL[i, : self._lengths[i]] for i in asking])
        shared = SharedRows(
            rows_L=self._moved(rows),
            starts_R=self._moved(running_ends(np.bincount(rows, minlength=self._n_rows))),
            places_L=self._moved(np.argsort(rows, kind="stable")),
        )
        return ends, shared

    def _moved(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]`, whose gradient is the same sum in the same order every time.

    Indexing adds gradients up from several threads at once, in whatever order they come.
    """
    taken = embedding(rows, x.reshape(len(x), -1))
    return taken.view(*rows.shape, *x.shape[1:])


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))
