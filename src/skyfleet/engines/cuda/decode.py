"""Decoding: one slot per sequence, one CUDA graph per batch size, sampling on the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skyfleet.engines.cuda.cuda_graphs import CudaGraphRecorder, copy_to_device, run_layers
from skyfleet.engines.cuda.prefix_groups import PrefixGroups
from skyfleet.engines.cuda.scheduler import Request
from skyfleet.engines.sampler import truncation_mask
from skyfleet.models.decoder import Decoder
from skyfleet.models.fused.layers import FusedLayer
from skyfleet.models.fused.ops import kernels

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MAX_STOP_TOKENS = 8
MAX_STEPS = 32
"""Decoding steps per round at most: the device keeps the outputs of one round."""


class GraphKey(NamedTuple):
    """What one CUDA graph is recorded for."""

    n_slots: int
    truncated: bool
    """Some slots sample with top-p, top-k or min-p."""
    shares_prefixes: bool
    """Some slots form prefix groups."""


class DecodeSlots:
    """Device state of all running sequences, and the decoding step over it."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        keys: Tensor,
        values: Tensor,
        recorder: CudaGraphRecorder,
        n_slots: int,
        capacity: int,
        block_size: int,
    ) -> None:
        self._decoder, self._keys, self._values = decoder, keys, values
        self._layers = decoder.fuse()
        device = decoder.device

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(n_slots, dtype=torch.int64)
        self.lengths = zeros(n_slots, dtype=torch.int32)
        self.active = zeros(n_slots, dtype=torch.int32)
        self.n_generated = zeros(n_slots, dtype=torch.int32)
        self.max_new_tokens = zeros(n_slots, dtype=torch.int32)
        self.inv_temperatures = torch.ones(n_slots, device=device)
        """1 / temperature; 0 is greedy."""
        self.top_p = torch.ones(n_slots, device=device)
        self.top_k = zeros(n_slots, dtype=torch.int32)
        self.min_p = zeros(n_slots, dtype=torch.float32)
        self.stop_ids = zeros(n_slots, MAX_STOP_TOKENS, dtype=torch.int32) - 1
        self.uniforms = zeros(n_slots, capacity, dtype=torch.float64)
        self.block_table = zeros(n_slots, -(-capacity // block_size), dtype=torch.int32)
        self._step = zeros(1, dtype=torch.int32)
        self._out_tokens = zeros(MAX_STEPS + 1, n_slots, dtype=torch.int32)
        self._out_logprobs = zeros(MAX_STEPS + 1, n_slots, dtype=torch.float32)
        self._slot_ids = torch.arange(n_slots, device=device, dtype=torch.int32)
        self._prefix_groups = PrefixGroups.allocate(
            n_slots, decoder.n_heads, decoder.head_dim, device
        )
        self._shares_prefixes = False
        self._kernels: Any = kernels(device, package="skyfleet.engines.cuda")
        self._attention: Any = kernels(device, "attention", package="skyfleet.engines.cuda")
        self._recorder = recorder
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}

    def assign(self, requests: Sequence[Request]) -> None:
        """Write the sampling parameters of each request into its slot; the slots stay inactive."""
        if not requests:
            return
        device = self.tokens.device
        at = copy_to_device([r.slot for r in requests], device)

        def put(target: Tensor, values: Sequence[float] | np.ndarray) -> None:
            target[at] = copy_to_device(values, device, target.dtype)

        # Sampling a token increments the length, so it starts one short.
        put(self.lengths, [len(r.token_ids) - 1 for r in requests])
        put(self.n_generated, [len(r.logprobs) for r in requests])
        put(self.max_new_tokens, [r.sampling.max_generate_length for r in requests])
        temperatures = [r.sampling.temperature for r in requests]
        put(self.inv_temperatures, [1 / t if t else 0.0 for t in temperatures])
        put(self.top_p, [r.sampling.top_p for r in requests])
        put(self.top_k, [r.sampling.top_k for r in requests])
        put(self.min_p, [r.sampling.min_p for r in requests])
        stop_ids = np.full((len(requests), MAX_STOP_TOKENS), -1)
        longest = max(r.sampling.max_generate_length for r in requests)
        uniforms = np.zeros((len(requests), longest))
        for row, request in enumerate(requests):
            stop_ids[row, : len(request.sampling.stop_token_ids)] = request.sampling.stop_token_ids
            uniforms[row, : request.sampling.max_generate_length] = request.draw_uniforms()
        put(self.stop_ids, stop_ids)
        put(self.uniforms[:, :longest], uniforms)

    def deactivate(self, slots: Sequence[int]) -> None:
        if slots:
            self.active[copy_to_device(slots, self.active.device)] = 0

    def begin_round(self) -> None:
        """Clear the outputs of the last round."""
        self._out_tokens.fill_(-1)
        self._step.zero_()

    def sample_first(self, hidden_ME: Tensor, slots: Sequence[int], *, truncated: bool) -> None:
        """Sample the first token of sequences whose prefill is complete, and activate their
        slots."""
        slots_M = copy_to_device(slots, hidden_ME.device, torch.int32)
        self.active[slots_M.long()] = 1
        self._sample(self._decoder.logits(hidden_ME), slots_M, truncated)

    def set_block_table(self, block_table: np.ndarray) -> None:
        self.block_table.copy_(copy_to_device(block_table, self.block_table.device))

    def update_prefix_groups(self, block_table: np.ndarray, lengths: dict[int, int]) -> None:
        """Group decoding slots (slot -> tokens) by shared prefix."""
        # With more query heads per key head, one sequence alone fills the tensor cores.
        few_heads = self._decoder.n_heads // self._decoder.n_kv_heads <= 8
        self._shares_prefixes = few_heads and self._prefix_groups.update(block_table, lengths)

    def decode(self, n_slots: int, steps: int, *, truncated: bool) -> None:
        """Queue `steps` decoding steps for the first `n_slots` slots, without waiting for them."""
        padded = next((size for size in BATCH_SIZES if size >= n_slots), n_slots)
        padded = min(padded, len(self.tokens))
        run_step = self._graph(
            GraphKey(n_slots=padded, truncated=truncated, shares_prefixes=self._shares_prefixes)
        )
        self._step.fill_(1)
        for _ in range(steps):
            run_step()

    async def fetch_outputs(
        self, n_slots: int, steps: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and logprobs, one row per slot; other tasks run while the device works."""
        await asyncio.sleep(0)
        if self.tokens.is_cuda:
            done = torch.cuda.Event()
            done.record()
            while not done.query():  # noqa: ASYNC110 - the device raises no asyncio event
                await asyncio.sleep(0)
        tokens_KS = self._out_tokens[: steps + 1, :n_slots].cpu().numpy()
        logprobs_KS = self._out_logprobs[: steps + 1, :n_slots].cpu().numpy()
        return tokens_KS.T.tolist(), logprobs_KS.T.tolist()

    def _graph(self, key: GraphKey) -> Callable[[], None]:
        if not self.tokens.is_cuda:
            return partial(self._forward, key)
        if key not in self._graphs:
            self._graphs[key] = self._record(key)
        return self._graphs[key].replay

    def _record(self, key: GraphKey) -> torch.cuda.CUDAGraph:
        """Record with every slot inactive, so that the warm-up runs change no sequence."""
        active = self.active.clone()
        self.active.zero_()
        graph, _ = self._recorder.record(
            partial(self._forward, key), before=lambda: self._step.fill_(1)
        )
        self.active.copy_(active)
        return graph

    def _forward(self, key: GraphKey) -> None:
        n, prefix_groups = key.n_slots, self._prefix_groups if key.shares_prefixes else None
        decoder = self._decoder
        lengths, active, block_table = self.lengths[:n], self.active[:n], self.block_table[:n]

        def attend(index: int, layer: FusedLayer, qkv_NX: Tensor) -> Tensor:
            keys, values = self._keys[index], self._values[index]
            q_NHD = self._kernels.write_kv(
                qkv_NX, keys, values, decoder.cos_PD, decoder.sin_PD,
                layer.heads.norms, lengths, active, block_table, eps=decoder.eps,
            )  # fmt: skip
            out_NHD: Tensor = self._attention.paged_decode_attention(
                q_NHD, keys, values, lengths, active, block_table, prefix_groups
            )
            return out_NHD

        y_NE = run_layers(decoder, self._layers, self.tokens[:n], attend)
        self._sample(decoder.logits(y_NE), self._slot_ids[:n], key.truncated)
        self._step += 1

    def _sample(self, logits_MV: Tensor, slots_M: Tensor, truncated: bool) -> None:
        if truncated:
            logits_MV = truncate_logits(
                logits_MV.float(), self.inv_temperatures[slots_M], self.top_p[slots_M],
                self.top_k[slots_M], self.min_p[slots_M],
            )  # fmt: skip
        self._kernels.sample_token(
            logits_MV, slots_M, inv_temperatures_S=self.inv_temperatures,
            uniforms_SW=self.uniforms, stop_ids_SZ=self.stop_ids, tokens_S=self.tokens,
            lengths_S=self.lengths, active_S=self.active, n_generated_S=self.n_generated,
            max_new_tokens_S=self.max_new_tokens, step_1=self._step,
            out_tokens_KS=self._out_tokens, out_logprobs_KS=self._out_logprobs,
        )  # fmt: skip


def truncate_logits(
    logits_MV: Tensor, inv_temperatures_M: Tensor, top_p_M: Tensor, top_k_M: Tensor, min_p_M: Tensor
) -> Tensor:
    """Set the logits of tokens outside min-p, top-k and top-p to minus infinity."""
    factors_M1 = torch.where(inv_temperatures_M == 0, 1.0, inv_temperatures_M).unsqueeze(1)
    probs_MV = torch.softmax(logits_MV * factors_M1, dim=-1)
    kept_MV = truncation_mask(probs_MV, top_p_N=top_p_M, top_k_N=top_k_M, min_p_N=min_p_M)
    return logits_MV.masked_fill(~kept_MV, -torch.inf)
