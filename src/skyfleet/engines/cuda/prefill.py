"""Reading: new tokens of several sequences in one forward pass, their keys and values into pages.

A pass over few tokens is hundreds of launches that take the host longer than the device: passes are
padded to a few sizes and recorded as graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skyfleet.engines.cuda.block_pool import PAGE
from skyfleet.engines.cuda.cuda_graphs import Recorder, moved, run_layers
from skyfleet.models.decoder import Decoder
from skyfleet.models.fused.flash import running_ends
from skyfleet.models.fused.functions import kernels
from skyfleet.models.fused.layers import FusedLayer

SIZES = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Tokens of a recorded pass."""
_LAUNCHES_FLOPS = 7.5e10
"""What an H200 multiplies while the host launches one layer: larger passes need no graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive tokens of one sequence that one forward pass reads."""

    token_ids: Sequence[int]
    """From `start` up to `stop`."""
    pages: np.ndarray
    """The sequence's own, as many as it has."""
    start: int
    stop: int


class Inputs(NamedTuple):
    """What a pass reads."""

    tokens_3T: Tensor
    """Of each token its id, its position, and its cell among all pages' tokens."""
    blocks_B4: Tensor
    """`read_pages`'s."""
    pages_P: Tensor
    """Those of the spans, one after another."""


class Reading:
    def __init__(
        self,
        decoder: Decoder,
        *,
        keys: Tensor,
        values: Tensor,
        recorder: Recorder,
        n_slots: int,
        n_pages: int,
        most_tokens: int,
    ) -> None:
        """`keys` and `values` are [layers, pages, PAGE, K, D].

        `n_pages` is what all slots can have, `most_tokens` what a pass may read.
        """
        self._decoder, self._keys, self._values = decoder, keys, values
        self._layers, self._recorder = decoder.fuse(), recorder
        self._device, self._n_slots = keys.device, n_slots
        # The tensor cores' tiles must be those of the learner's forward; float32 has none.
        self._rows = 16 if decoder.dtype == torch.float32 else 128
        self._attention = kernels(keys.device, "reading", package="skyfleet.engines.cuda")
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        flops_a_token = 2 * self._layers[0].n_weights
        small = [size for size in SIZES if size * flops_a_token <= _LAUNCHES_FLOPS]
        enough = next((size for size in small if size >= most_tokens), SIZES[-1])
        self._sizes = [size for size in small if size <= enough]
        most = max(self._sizes, default=0)
        self._static = Inputs(
            tokens_3T=torch.zeros(3, most, dtype=torch.int64, device=keys.device),
            blocks_B4=self._zeros(self._n_blocks(most), 4),
            pages_P=self._zeros(n_pages),
        )

    def hidden(self, spans: Sequence[Span]) -> Tensor:
        """The new tokens' hidden states, one span after another [T, E].

        The next call or decoding step overwrites them: all graphs share their memory.
        """
        given = self._laid_out(spans)
        n = given[0].shape[1]
        size = next((size for size in self._sizes if size >= n), 0)
        if not size:
            return self._forward(Inputs(*(moved(x, self._device) for x in given)))
        static = self._inputs_of(size, len(given[2]))
        run = self._graph(size) if self._device.type == "cuda" else self._forward
        # Behind them zeros: nobody's tokens, and blocks without a row.
        for target, values in zip(static, given, strict=True):
            padded = np.zeros(tuple(target.shape), dtype=values.dtype)
            padded[tuple(map(slice, values.shape))] = values
            target.copy_(moved(padded, self._device))
        return run(static)[:n]

    def _graph(self, size: int) -> Callable[[Inputs], Tensor]:
        # All at once and the largest first, so that the smaller find room in what it left.
        for each in reversed(self._sizes):
            # Those recorded before an error stay: they hold the memory that the others share.
            if each not in self._graphs:
                self._record(each)
        graph, hidden_TE = self._graphs[size]

        def replay(_: Inputs) -> Tensor:
            graph.replay()
            return hidden_TE

        return replay

    def _record(self, size: int) -> None:
        """With no blocks and every token in page 0, which is nobody's, trying it changes nothing."""
        static = self._inputs_of(size, self._static.pages_P.numel())
        static.tokens_3T.zero_()
        static.blocks_B4.zero_()
        self._graphs[size] = self._recorder.record(partial(self._forward, static))

    def _laid_out(self, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        starts = np.array([span.start for span in spans])
        lengths = np.array([span.stop for span in spans]) - starts
        ends = running_ends(lengths).astype(np.int64)
        pages = np.concatenate([span.pages for span in spans])
        pages_at = running_ends(np.array([len(span.pages) for span in spans]))[:-1]
        positions = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
        own = pages[np.repeat(pages_at, lengths) + positions // PAGE].astype(np.int64)
        ids = np.fromiter(chain.from_iterable(span.token_ids for span in spans), np.int64)
        # A span is cut into blocks from its beginning.
        n_blocks = -(-lengths // self._rows)
        owner = np.repeat(np.arange(len(spans)), n_blocks)
        ahead = (np.arange(len(owner)) - running_ends(n_blocks)[owner]) * self._rows
        blocks = np.stack(
            [
                ends[owner] + ahead,
                np.minimum(lengths[owner] - ahead, self._rows),
                starts[owner] + ahead,
                pages_at[owner],
            ],
            axis=1,
        ).astype(np.int32)
        return np.stack([ids, positions, own * PAGE + positions % PAGE]), blocks, pages

    def _forward(self, inputs: Inputs) -> Tensor:
        token_ids_T, positions_T, cells_T = inputs.tokens_3T.unbind()
        decoder, turn = self._decoder, kernels(self._device).turn

        def mix(index: int, layer: FusedLayer, qkv_TX: Tensor) -> Tensor:
            q_THD, k_TKD, v_TKD = turn(
                qkv_TX, layer.heads, decoder.cos_PD, decoder.sin_PD, positions_T
            )
            keys, values = self._keys[index], self._values[index]
            keys.flatten(0, 1).index_copy_(0, cells_T, k_TKD)
            values.flatten(0, 1).index_copy_(0, cells_T, v_TKD)
            out_THD: Tensor = self._attention.read_pages(
                q_THD, keys, values, inputs.blocks_B4, inputs.pages_P, self._rows
            )
            return out_THD

        return run_layers(decoder, self._layers, token_ids_T, mix)

    def _inputs_of(self, size: int, n_pages: int) -> Inputs:
        """A graph knows where they begin, and takes of the pages what its blocks name."""
        return Inputs(
            tokens_3T=self._static.tokens_3T[:, :size],
            blocks_B4=self._static.blocks_B4[: self._n_blocks(size)],
            pages_P=self._static.pages_P[:n_pages],
        )

    def _n_blocks(self, size: int) -> int:
        """At most, of so many tokens."""
        return -(-size // self._rows) + min(size, self._n_slots)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)
