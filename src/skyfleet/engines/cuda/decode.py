"""Decoding: one slot per running sequence, one CUDA graph per batch size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skyfleet.engines.cuda.cuda_graphs import Recorder, moved, run_layers
from skyfleet.engines.cuda.prefix_groups import Kin
from skyfleet.engines.cuda.scheduler import Request
from skyfleet.models.decoder import Decoder
from skyfleet.models.fused.functions import kernels
from skyfleet.models.fused.layers import FusedLayer


def truncate(
    logits_MV: Tensor, factors_M: Tensor, top_p_M: Tensor, top_k_M: Tensor, min_p_M: Tensor
) -> Tensor:
    """Minus infinity for every token that is cut: min-p, then top-k, then top-p of what is left."""
    tempered_MV = logits_MV * torch.where(factors_M == 0, 1.0, factors_M).unsqueeze(1)
    probs_MV, order_MV = torch.softmax(tempered_MV, dim=-1).sort(dim=-1, descending=True)
    keep_MV = probs_MV >= min_p_M.unsqueeze(1) * probs_MV[:, :1]
    ranks_V = torch.arange(logits_MV.shape[-1], device=logits_MV.device)
    keep_MV &= (top_k_M.unsqueeze(1) <= 0) | (ranks_V < top_k_M.unsqueeze(1))
    left_MV = probs_MV * keep_MV
    left_MV = left_MV / left_MV.sum(dim=-1, keepdim=True)
    keep_MV &= (left_MV.cumsum(dim=-1) - left_MV < top_p_M.unsqueeze(1)) | (top_p_M >= 1).unsqueeze(
        1
    )
    kept_MV = torch.zeros_like(keep_MV).scatter(1, order_MV, keep_MV)
    return logits_MV.masked_fill(~kept_MV, -torch.inf)


BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
N_STOPS = 8
MOST_STEPS = 32
"""Tokens between two looks at what was said."""


class Variant(NamedTuple):
    """What one graph is recorded for."""

    n: int
    """Slots."""
    truncated: bool
    shares: bool
    """Some of them begin alike."""


class Slots:
    def __init__(
        self,
        decoder: Decoder,
        *,
        keys: Tensor,
        values: Tensor,
        recorder: Recorder,
        n_slots: int,
        capacity: int,
        page: int,
    ) -> None:
        self._decoder, self._keys, self._values = decoder, keys, values
        self._layers = decoder.fuse()
        device = decoder.device

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(n_slots, dtype=torch.int64)
        self.lengths = zeros(n_slots, dtype=torch.int32)
        self.active = zeros(n_slots, dtype=torch.int32)
        self.said = zeros(n_slots, dtype=torch.int32)
        self.most = zeros(n_slots, dtype=torch.int32)
        self.factors = torch.ones(n_slots, device=device)
        """One over the temperature; 0 is greedy."""
        self.top_p = torch.ones(n_slots, device=device)
        self.top_k = zeros(n_slots, dtype=torch.int32)
        self.min_p = zeros(n_slots, dtype=torch.float32)
        self.stops = zeros(n_slots, N_STOPS, dtype=torch.int32) - 1
        self.uniforms = zeros(n_slots, capacity, dtype=torch.float64)
        self.table = zeros(n_slots, -(-capacity // page), dtype=torch.int32)
        self._step = zeros(1, dtype=torch.int32)
        self._out_tokens = zeros(MOST_STEPS + 1, n_slots, dtype=torch.int32)
        self._out_logprobs = zeros(MOST_STEPS + 1, n_slots, dtype=torch.float32)
        self._every = torch.arange(n_slots, device=device, dtype=torch.int32)
        self._kin = Kin.among(n_slots, decoder.n_heads, decoder.head_dim, device)
        self._kernels: Any = kernels(device, package="skyfleet.engines.cuda")
        self._attention: Any = kernels(device, "attention", package="skyfleet.engines.cuda")
        self._recorder = recorder
        self._graphs: dict[Variant, torch.cuda.CUDAGraph] = {}
        self._shares = False

    def take(self, requests: Sequence[Request]) -> None:
        """Each request's slot becomes what its sampling says; nobody speaks yet."""
        if not requests:
            return
        device = self.tokens.device
        at = moved([r.slot for r in requests], device)

        def put(target: Tensor, values: Sequence[float] | np.ndarray) -> None:
            target[at] = moved(values, device, target.dtype)

        # Speaking counts the token before it as placed.
        put(self.lengths, [len(r.token_ids) - 1 for r in requests])
        put(self.said, [len(r.logprobs) for r in requests])
        put(self.most, [r.sampling.max_generate_length for r in requests])
        temperatures = [r.sampling.temperature for r in requests]
        put(self.factors, [1 / t if t else 0.0 for t in temperatures])
        put(self.top_p, [r.sampling.top_p for r in requests])
        put(self.top_k, [r.sampling.top_k for r in requests])
        put(self.min_p, [r.sampling.min_p for r in requests])
        stops = np.full((len(requests), N_STOPS), -1)
        longest = max(r.sampling.max_generate_length for r in requests)
        uniforms = np.zeros((len(requests), longest))
        for row, request in enumerate(requests):
            stops[row, : len(request.sampling.stop_token_ids)] = request.sampling.stop_token_ids
            uniforms[row, : request.sampling.max_generate_length] = request.uniforms
        put(self.stops, stops)
        put(self.uniforms[:, :longest], uniforms)

    def let_rest(self, slots: Sequence[int]) -> None:
        if slots:
            self.active[moved(slots, self.active.device)] = 0

    def begin(self) -> None:
        """Nothing has been said in this round."""
        self._out_tokens.fill_(-1)
        self._step.zero_()

    def speak(self, hidden_ME: Tensor, slots: Sequence[int], *, truncated: bool) -> None:
        """The first token of sequences whose prompt was just read."""
        slots_M = moved(slots, hidden_ME.device, torch.int32)
        self.active[slots_M.long()] = 1
        self._draw(self._decoder.logits(hidden_ME), slots_M, truncated)

    def seat(self, table: np.ndarray) -> None:
        """The pages of every slot."""
        self.table.copy_(moved(table, self.table.device))

    def gather(self, table: np.ndarray, lengths: dict[int, int]) -> None:
        """Find who shares what, among the slots that speak and have so many tokens."""
        # With more heads over one key head a sequence alone fills the tensor cores.
        few = self._decoder.n_heads // self._decoder.n_kv_heads <= 8
        self._shares = few and self._kin.gather(table, lengths)

    def decode(self, n_slots: int, steps: int, *, truncated: bool) -> None:
        """`steps` more tokens for the first `n_slots` slots; queued, not waited for."""
        bucket = next((b for b in BUCKETS if b >= n_slots), n_slots)
        bucket = min(bucket, len(self.tokens))
        move_on = self._graph(Variant(n=bucket, truncated=truncated, shares=self._shares))
        self._step.fill_(1)
        for _ in range(steps):
            move_on()

    async def said_so_far(
        self, n_slots: int, steps: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and logprobs, a row a slot; others go on while the device works."""
        await asyncio.sleep(0)
        if self.tokens.is_cuda:
            done = torch.cuda.Event()
            done.record()
            while not done.query():  # noqa: ASYNC110 - the device raises no asyncio event
                await asyncio.sleep(0)
        tokens_KS = self._out_tokens[: steps + 1, :n_slots].cpu().numpy()
        logprobs_KS = self._out_logprobs[: steps + 1, :n_slots].cpu().numpy()
        return tokens_KS.T.tolist(), logprobs_KS.T.tolist()

    def _graph(self, variant: Variant) -> Callable[[], None]:
        if not self.tokens.is_cuda:
            return partial(self._forward, variant)
        if variant not in self._graphs:
            self._graphs[variant] = self._recorded(variant)
        return self._graphs[variant].replay

    def _recorded(self, variant: Variant) -> torch.cuda.CUDAGraph:
        """With every slot at rest, so that trying it moves nobody."""
        kept = self.active.clone()
        self.active.zero_()
        graph, _ = self._recorder.record(
            partial(self._forward, variant), before=lambda: self._step.fill_(1)
        )
        self.active.copy_(kept)
        return graph

    def _forward(self, variant: Variant) -> None:
        n, kin = variant.n, self._kin if variant.shares else None
        decoder = self._decoder
        lengths, active, table = self.lengths[:n], self.active[:n], self.table[:n]

        def mix(index: int, layer: FusedLayer, qkv_NX: Tensor) -> Tensor:
            keys, values = self._keys[index], self._values[index]
            q_NHD = self._kernels.place(
                qkv_NX, keys, values, decoder.cos_PD, decoder.sin_PD,
                layer.heads.norms, lengths, active, table, eps=decoder.eps,
            )  # fmt: skip
            out_NHD: Tensor = self._attention.attend(
                q_NHD, keys, values, lengths, active, table, kin
            )
            return out_NHD

        y_NE = run_layers(decoder, self._layers, self.tokens[:n], mix)
        self._draw(decoder.logits(y_NE), self._every[:n], variant.truncated)
        self._step += 1

    def _draw(self, logits_MV: Tensor, slots_M: Tensor, truncated: bool) -> None:
        if truncated:
            logits_MV = truncate(
                logits_MV.float(), self.factors[slots_M], self.top_p[slots_M],
                self.top_k[slots_M], self.min_p[slots_M],
            )  # fmt: skip
        self._kernels.speak(
            logits_MV, slots_M,
            factors_S=self.factors, uniforms_SW=self.uniforms, stops_SZ=self.stops,
            tokens_S=self.tokens, lengths_S=self.lengths, active_S=self.active, said_S=self.said,
            most_S=self.most, step_1=self._step, out_tokens_KS=self._out_tokens,
            out_logprobs_KS=self._out_logprobs,
        )  # fmt: skip
