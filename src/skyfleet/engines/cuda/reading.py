"""Reading: attention of prompts over the pages, new tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyfleet.engines.cuda.moving import moved
from skyfleet.engines.cuda.pages import PAGE
from skyfleet.models.fused.flash import Ends, flash_varlen, running_ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive tokens of one sequence that one forward pass reads."""

    pages: Sequence[int]
    start: int
    stop: int


class PagedReading:
    def __init__(self, keys: Tensor, values: Tensor, spans: Sequence[Span]) -> None:
        """`keys` and `values` are [layers, pages, PAGE, K, D]."""
        self._keys, self._values = keys, values
        device = keys.device
        starts = np.array([span.start for span in spans])
        stops = np.array([span.stop for span in spans])
        self._fresh = not starts.any()
        """Nothing was read before: what attends is what was just computed."""
        new_T, every_L = _ranges(starts, stops), _ranges(np.zeros_like(starts), stops)
        self.positions_T = moved(new_T, device)
        self._new_T = moved(_cells(spans, new_T, stops - starts), device)
        self._all_L = moved(_cells(spans, every_L, stops), device)
        self._ends = Ends(
            queries=moved(running_ends(stops - starts), device),
            keys=moved(running_ends(stops), device),
            most_queries=int((stops - starts).max()),
            most_keys=int(stops.max()),
        )

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        keys, values = self._keys[layer].flatten(0, 1), self._values[layer].flatten(0, 1)
        keys[self._new_T] = k_TKD
        values[self._new_T] = v_TKD
        if not self._fresh:
            k_TKD, v_TKD = keys[self._all_L], values[self._all_L]
        if q_THD.dtype == torch.float32:
            return self._padded(q_THD, k_TKD, v_TKD)
        return flash_varlen(q_THD, k_TKD, v_TKD, self._ends)

    def _padded(self, q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> Tensor:
        """Flash attention has no float32: sequences are padded to a rectangle instead."""
        ends = self._ends
        q_starts, k_starts = ends.queries[:-1].unsqueeze(1), ends.keys[:-1].unsqueeze(1)
        q_lengths, k_lengths = ends.queries.diff().unsqueeze(1), ends.keys.diff().unsqueeze(1)
        query = torch.arange(ends.most_queries, device=q_THD.device)
        key = torch.arange(ends.most_keys, device=q_THD.device)
        q_BQ = q_starts + torch.minimum(query, q_lengths - 1)
        k_BL = k_starts + torch.minimum(key, k_lengths - 1)
        # The last query sees every key.
        visible_B1QL = key <= (k_lengths - q_lengths + query)[:, None, :, None]
        out_BHQD = scaled_dot_product_attention(
            q_THD[q_BQ].transpose(1, 2),
            k_LKD[k_BL].transpose(1, 2),
            v_LKD[k_BL].transpose(1, 2),
            attn_mask=visible_B1QL,
            enable_gqa=q_THD.shape[1] != k_LKD.shape[1],
        )
        return out_BHQD.transpose(1, 2)[query < q_lengths]


def _ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """From each start up to its stop, one after another."""
    lengths = stops - starts
    ranges: np.ndarray = np.arange(lengths.sum()) + np.repeat(stops - lengths.cumsum(), lengths)
    return ranges


def _cells(spans: Sequence[Span], positions: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Where the tokens at these positions, so many of each span, stand among all pages' tokens."""
    pages = np.fromiter(chain.from_iterable(span.pages for span in spans), np.int64)
    first = running_ends(np.array([len(span.pages) for span in spans]))[:-1]
    own = pages[np.repeat(first, lengths) + positions // PAGE]
    cells: np.ndarray = own * PAGE + positions % PAGE
    return cells
