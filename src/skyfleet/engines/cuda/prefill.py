"""Prefill: one forward pass over the new prompt tokens of several sequences, into their KV blocks.

For few tokens the host needs longer to launch the kernels than the device to run them. Small passes
are therefore padded to a few sizes and recorded as CUDA graphs.
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

from skyfleet.engines.cuda.cuda_graphs import CudaGraphRecorder, copy_to_device, run_layers
from skyfleet.engines.prefix_cache import BLOCK_SIZE
from skyfleet.models.decoder import Decoder
from skyfleet.models.fused.flash_attention import cumulative_lengths
from skyfleet.models.fused.layers import FusedLayer
from skyfleet.models.fused.ops import kernels

GRAPH_SIZES = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Tokens of a recorded pass."""
_LAUNCH_BOUND_FLOPS = 7.5e10
"""What an H200 computes while the host launches one layer: larger passes need no graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Consecutive tokens of one sequence that one prefill pass computes."""

    token_ids: Sequence[int]
    """From `start` up to `stop`."""
    blocks: np.ndarray
    """All KV blocks of the sequence."""
    start: int
    stop: int


class PrefillInputs(NamedTuple):
    """Device inputs of one pass."""

    tokens_3T: Tensor
    """Per token: its id, its position, and its cell in the KV cache."""
    tiles_B4: Tensor
    """Query tiles, as `paged_prefill_attention` takes them."""
    blocks_P: Tensor
    """The KV blocks of all chunks, concatenated."""


class Prefill:
    def __init__(
        self,
        decoder: Decoder,
        *,
        keys: Tensor,
        values: Tensor,
        recorder: CudaGraphRecorder,
        n_slots: int,
        n_blocks: int,
        max_tokens: int,
    ) -> None:
        """`keys` and `values` are [layers, blocks, BLOCK_SIZE, K, D].

        `n_blocks` is the number of blocks that all slots together can name, `max_tokens` the number
        of tokens per pass.
        """
        self._decoder, self._keys, self._values = decoder, keys, values
        self._layers, self._recorder = decoder.fuse(), recorder
        self._device, self._n_slots = keys.device, n_slots
        # The learner's forward uses the same tensor-core tiles; float32 has none.
        self._tile_rows = 16 if decoder.dtype == torch.float32 else 128
        self._attention = kernels(keys.device, "attention", package="skyfleet.engines.cuda")
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        flops_per_token = 2 * self._layers[0].n_weights
        small = [size for size in GRAPH_SIZES if size * flops_per_token <= _LAUNCH_BOUND_FLOPS]
        enough = next((size for size in small if size >= max_tokens), GRAPH_SIZES[-1])
        self._sizes = [size for size in small if size <= enough]
        largest = max(self._sizes, default=0)
        self._static = PrefillInputs(
            tokens_3T=torch.zeros(3, largest, dtype=torch.int64, device=keys.device),
            tiles_B4=self._zeros(self._max_tiles(largest), 4),
            blocks_P=self._zeros(n_blocks),
        )

    def run(self, chunks: Sequence[PrefillChunk]) -> Tensor:
        """Return the hidden states of the new tokens, one chunk after another [T, E].

        The next prefill or decoding step overwrites them, because all graphs share their memory.
        """
        inputs = self._lay_out(chunks)
        n = inputs[0].shape[1]
        size = next((size for size in self._sizes if size >= n), 0)
        if not size:
            return self._forward(PrefillInputs(*(copy_to_device(x, self._device) for x in inputs)))
        static = self._static_inputs(size, len(inputs[2]))
        run = self._graph(size) if self._device.type == "cuda" else self._forward
        # The padding is zeros: tokens of the null block, and tiles without a row.
        for target, values in zip(static, inputs, strict=True):
            padded = np.zeros(tuple(target.shape), dtype=values.dtype)
            padded[tuple(map(slice, values.shape))] = values
            target.copy_(copy_to_device(padded, self._device))
        return run(static)[:n]

    def _graph(self, size: int) -> Callable[[PrefillInputs], Tensor]:
        # Record all sizes at once and the largest first: the smaller ones reuse its memory.
        for each in reversed(self._sizes):
            # Graphs recorded before an error stay, because they hold the memory that all share.
            if each not in self._graphs:
                self._record(each)
        graph, hidden_TE = self._graphs[size]

        def replay(_: PrefillInputs) -> Tensor:
            graph.replay()
            return hidden_TE

        return replay

    def _record(self, size: int) -> None:
        """Record without tiles and with every token in the null block, so that warm-up changes
        nothing."""
        static = self._static_inputs(size, self._static.blocks_P.numel())
        static.tokens_3T.zero_()
        static.tiles_B4.zero_()
        self._graphs[size] = self._recorder.record(partial(self._forward, static))

    def _lay_out(self, chunks: Sequence[PrefillChunk]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        starts = np.array([chunk.start for chunk in chunks])
        lengths = np.array([chunk.stop for chunk in chunks]) - starts
        ends = cumulative_lengths(lengths).astype(np.int64)
        blocks = np.concatenate([chunk.blocks for chunk in chunks])
        blocks_at = cumulative_lengths(np.array([len(chunk.blocks) for chunk in chunks]))[:-1]
        positions = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
        own = blocks[np.repeat(blocks_at, lengths) + positions // BLOCK_SIZE].astype(np.int64)
        ids = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64)
        # Tiles are cut from the start of a chunk.
        n_tiles = -(-lengths // self._tile_rows)
        owner = np.repeat(np.arange(len(chunks)), n_tiles)
        offset = (np.arange(len(owner)) - cumulative_lengths(n_tiles)[owner]) * self._tile_rows
        tiles = np.stack(
            [
                ends[owner] + offset,
                np.minimum(lengths[owner] - offset, self._tile_rows),
                starts[owner] + offset,
                blocks_at[owner],
            ],
            axis=1,
        ).astype(np.int32)
        cells = own * BLOCK_SIZE + positions % BLOCK_SIZE
        return np.stack([ids, positions, cells]), tiles, blocks

    def _forward(self, inputs: PrefillInputs) -> Tensor:
        token_ids_T, positions_T, cells_T = inputs.tokens_3T.unbind()
        decoder, apply_rope = self._decoder, kernels(self._device).apply_rope

        def attend(index: int, layer: FusedLayer, qkv_TX: Tensor) -> Tensor:
            q_THD, k_TKD, v_TKD = apply_rope(
                qkv_TX, layer.heads, decoder.cos_PD, decoder.sin_PD, positions_T
            )
            keys, values = self._keys[index], self._values[index]
            keys.flatten(0, 1).index_copy_(0, cells_T, k_TKD)
            values.flatten(0, 1).index_copy_(0, cells_T, v_TKD)
            out_THD: Tensor = self._attention.paged_prefill_attention(
                q_THD, keys, values, inputs.tiles_B4, inputs.blocks_P, self._tile_rows
            )
            return out_THD

        return run_layers(decoder, self._layers, token_ids_T, attend)

    def _static_inputs(self, size: int, n_blocks: int) -> PrefillInputs:
        """Views of the static inputs: a graph knows where they begin, and its tiles name the
        blocks."""
        return PrefillInputs(
            tokens_3T=self._static.tokens_3T[:, :size],
            tiles_B4=self._static.tiles_B4[: self._max_tiles(size)],
            blocks_P=self._static.blocks_P[:n_blocks],
        )

    def _max_tiles(self, size: int) -> int:
        return -(-size // self._tile_rows) + min(size, self._n_slots)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)
