"""Reading: attention of prompts over the pages, new tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyfleet.engines.cuda.pages import PAGE
from skyfleet.models.fused.flash import Ends, flash_varlen


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
        all_cells = [_cells(span.pages, span.stop) for span in spans]
        new = [cells[s.start :] for cells, s in zip(all_cells, spans, strict=True)]
        self.positions_T = _moved(
            np.concatenate([np.arange(s.start, s.stop) for s in spans]), device
        )
        self._new_T = _moved(np.concatenate(new), device)
        self._all_L = _moved(np.concatenate(all_cells), device)
        self._fresh = all(span.start == 0 for span in spans)
        """Nothing was read before: what attends is what was just computed."""
        self._ends = Ends.of(
            np.array([len(cells) for cells in new]), np.array([s.stop for s in spans]), device
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


def _cells(pages: Sequence[int], stop: int) -> np.ndarray:
    """Where the first `stop` tokens of a sequence stand among all pages' tokens."""
    starts = np.asarray(pages[: -(-stop // PAGE)], dtype=np.int64) * PAGE
    return (starts[:, None] + np.arange(PAGE)).ravel()[:stop]


def _moved(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
