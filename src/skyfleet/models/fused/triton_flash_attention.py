"""Triton kernels of flash attention over packed sequences: forward, backward, and shared rows.

Every sum has one owner and one order, so the bits repeat. The forward pass processes keys in the
same blocks as the engine's prefill and decoding kernels. The backward pass has one kernel per query
block and one per key block; both recompute the scores, and programs add nothing to each other's
results. The gradient of a sequence does not depend on its neighbours in the pack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyfleet.models.fused.head_layout import KEY_BLOCK
from skyfleet.models.fused.triton_matmul import device_traits


@triton.jit
def online_softmax_update(q, k, v, visible, row_max, row_sum, acc, scale, PRECISION: tl.constexpr):
    """Add one block of keys and values to the running maximum, sum and output of the queries."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, -1e30)
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    rescale = tl.exp(row_max - new_max)
    probs = tl.where(visible, tl.exp(scores - new_max[:, None]), 0.0)
    row_sum = row_sum * rescale + tl.sum(probs, axis=1)
    acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=["n_queries"])
def _flash_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, scale, n_queries,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_start, k_start = tl.load(cu_seqlens_q_ptr + sequence), tl.load(cu_seqlens_k_ptr + sequence)
    q_length = tl.load(cu_seqlens_q_ptr + sequence + 1) - q_start
    k_length = tl.load(cu_seqlens_k_ptr + sequence + 1) - k_start
    if block * ROWS >= q_length:
        return
    row = block * ROWS + tl.arange(0, ROWS)
    valid = row < q_length
    # The last query sees every key.
    position = k_length - q_length + row
    at = tl.arange(0, HEAD_DIM)
    q_at = ((q_start + row).to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + at[None, :]
    q = tl.load(q_ptr + q_at, mask=valid[:, None], other=0.0)
    row_max = tl.full((ROWS,), -1e30, tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    stop = tl.minimum(k_length, k_length - q_length + (block + 1) * ROWS)
    for start in range(0, stop, KEY_BLOCK):
        token = start + tl.arange(0, KEY_BLOCK)
        inside = token < k_length
        cell = ((k_start + token).to(tl.int64) * KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(k_ptr + cell[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + cell[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        visible = token[None, :] <= position[:, None]
        row_max, row_sum, acc = online_softmax_update(
            q, k, v, visible, row_max, row_sum, acc, scale, "tf32"
        )
    acc = acc / tl.maximum(row_sum, 1e-30)[:, None]
    tl.store(out_ptr + q_at, acc.to(q.dtype), mask=valid[:, None])
    lse = row_max + tl.log(tl.maximum(row_sum, 1e-30))
    tl.store(lse_ptr + head.to(tl.int64) * n_queries + q_start + row, lse, mask=valid)


def flash_forward(
    q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_queries: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention output [T, H, D], and the log-sum-exp of each query's scores [H, T]."""
    n, n_heads, head_dim = q_THD.shape
    out_THD = torch.empty_like(q_THD)
    lse_HT = torch.empty(n_heads, n, dtype=torch.float32, device=q_THD.device)
    rows = 128
    _flash_forward_kernel[(triton.cdiv(max_queries, rows), n_heads, len(cu_seqlens_q) - 1)](
        q_THD, k_LKD, v_LKD, out_THD, lse_HT, cu_seqlens_q, cu_seqlens_k, head_dim**-0.5, n,
        HEADS=n_heads, KV_HEADS=k_LKD.shape[1], HEAD_DIM=head_dim, ROWS=rows, KEY_BLOCK=KEY_BLOCK,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out_THD, lse_HT


_LOG2_E = tl.constexpr(1.4426950408889634)


class Tile(NamedTuple):
    """Queries and keys per block, and the resources of one program."""

    rows: int
    keys: int
    warps: int
    stages: int


NARROW_TILES = Tile(64, 32, 4, 3), Tile(32, 64, 4, 3)
WIDE_TILES = Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)
"""Of the dq kernel and of the dk/dv kernel, whose rows must not exceed those of the dq kernel."""


@triton.jit
def _accumulate_dq(
    dq, q, dout, lse, delta, k_ptr, v_ptr, kv_at, k_start, start, position, k_length, factor,
    STRIDE: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the gradient of the queries."""
    token = start + tl.arange(0, STEP)
    offset = (k_start.to(tl.int64) + start) * STRIDE
    if MASKED:
        inside = (token < k_length)[:, None]
        k = tl.load(k_ptr + offset + kv_at, mask=inside, other=0.0)
        v = tl.load(v_ptr + offset + kv_at, mask=inside, other=0.0)
    else:
        k = tl.load(k_ptr + offset + kv_at)
        v = tl.load(v_ptr + offset + kv_at)
    prob = tl.exp2(tl.dot(q, tl.trans(k)) * factor - lse[:, None])
    if MASKED:
        prob = tl.where(token[None, :] <= position[:, None], prob, 0.0)
    dscores = prob * (tl.dot(dout, tl.trans(v)) - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["n_queries"])
def _dq_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dq_ptr, query_stats_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, scale, n_queries, n_stats,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, STATS_BLOCK: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(0), tl.program_id(1)
    # The last queries see the most keys: start the longest work first.
    block = tl.num_programs(2) - 1 - tl.program_id(2)
    q_start, k_start = tl.load(cu_seqlens_q_ptr + sequence), tl.load(cu_seqlens_k_ptr + sequence)
    q_length = tl.load(cu_seqlens_q_ptr + sequence + 1) - q_start
    k_length = tl.load(cu_seqlens_k_ptr + sequence + 1) - k_start
    if block * ROWS >= q_length:
        return
    row = block * ROWS + tl.arange(0, ROWS)
    valid = row < q_length
    at = tl.arange(0, HEAD_DIM)
    q_at = ((q_start + row).to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + at[None, :]
    q = tl.load(q_ptr + q_at, mask=valid[:, None], other=0.0)
    dout = tl.load(dout_ptr + q_at, mask=valid[:, None], other=0.0)
    out = tl.load(out_ptr + q_at, mask=valid[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    lse_at = lse_ptr + head.to(tl.int64) * n_queries + q_start + row
    # Padding rows get probability 0.
    lse = tl.load(lse_at, mask=valid, other=float("inf")) * _LOG2_E
    # Every sequence has room for whole blocks.
    stat_at = head.to(tl.int64) * n_stats + (q_start // STATS_BLOCK + sequence) * STATS_BLOCK + row
    tl.store(query_stats_ptr + stat_at * 2, lse)
    tl.store(query_stats_ptr + stat_at * 2 + 1, delta)
    kv_at = tl.arange(0, STEP)[:, None] * KV_HEADS + head // (HEADS // KV_HEADS)
    kv_at = kv_at * HEAD_DIM + at[None, :]
    # The last query sees every key.
    position = k_length - q_length + row
    before = k_length - q_length + block * ROWS
    factor = scale * _LOG2_E
    dq = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    seen_by_all = (before + 1) // STEP * STEP
    # In the other order, ptxas serialises the matrix products.
    for start in range(seen_by_all, tl.minimum(k_length, before + ROWS), STEP):
        dq = _accumulate_dq(
            dq, q, dout, lse, delta, k_ptr, v_ptr, kv_at, k_start, start, position,
            k_length, factor, KV_HEADS * HEAD_DIM, STEP, True,
        )  # fmt: skip
    for start in range(0, seen_by_all, STEP):
        dq = _accumulate_dq(
            dq, q, dout, lse, delta, k_ptr, v_ptr, kv_at, k_start, start, position,
            k_length, factor, KV_HEADS * HEAD_DIM, STEP, False,
        )  # fmt: skip
    tl.store(dq_ptr + q_at, (dq * scale).to(q.dtype), mask=valid[:, None])


@triton.jit
def _accumulate_dkdv(
    dk, dv, k, v, q_ptr, dout_ptr, q_at, query_stats_ptr, q_start, stats_start, index, first,
    q_length, seen_from, n_stats, factor,
    HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one block of one head's queries to the gradients of the keys and values it sees."""
    head = index % HEADS_PER_KV
    first_row = first + index // HEADS_PER_KV * ROWS
    row = first_row + tl.arange(0, ROWS)
    valid = (row < q_length)[:, None]
    offset = ((q_start.to(tl.int64) + first_row) * HEADS + head) * HEAD_DIM
    q = tl.load(q_ptr + offset + q_at, mask=valid, other=0.0)
    dout = tl.load(dout_ptr + offset + q_at, mask=valid, other=0.0)
    stat_at = (stats_start + head * n_stats + first_row) * 2 + tl.arange(0, 2 * ROWS)
    lse, delta = tl.split(tl.reshape(tl.load(query_stats_ptr + stat_at), (ROWS, 2)))
    prob = tl.exp2(tl.dot(k, tl.trans(q)) * factor - lse[None, :])
    if MASKED:
        apart = tl.arange(0, STEP)[:, None] - tl.arange(0, ROWS)[None, :]
        prob = tl.where(apart <= first_row - seen_from, prob, 0.0)
    dv = tl.dot(prob.to(dout.dtype), dout, dv)
    dscores = prob * (tl.dot(v, tl.trans(dout)) - delta[None, :])
    return tl.dot(dscores.to(q.dtype), q, dk), dv


@triton.jit
def _dkdv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, query_stats_ptr, dk_ptr, dv_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, scale, n_stats,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, STATS_BLOCK: tl.constexpr,
):  # fmt: skip
    kv_head, sequence = tl.program_id(0), tl.program_id(1)
    q_start, k_start = tl.load(cu_seqlens_q_ptr + sequence), tl.load(cu_seqlens_k_ptr + sequence)
    q_length = tl.load(cu_seqlens_q_ptr + sequence + 1) - q_start
    k_length = tl.load(cu_seqlens_k_ptr + sequence + 1) - k_start
    # Few queries see the last keys: count blocks from the end, to start the longest work first.
    block = tl.cdiv(k_length, STEP) - tl.num_programs(2) + tl.program_id(2)
    if block < 0:
        return
    token = block * STEP + tl.arange(0, STEP)
    inside = (token < k_length)[:, None]
    at = tl.arange(0, HEAD_DIM)
    kv_at = ((k_start + token).to(tl.int64)[:, None] * KV_HEADS + kv_head) * HEAD_DIM + at[None, :]
    k = tl.load(k_ptr + kv_at, mask=inside, other=0.0)
    v = tl.load(v_ptr + kv_at, mask=inside, other=0.0)
    dk, dv = tl.zeros((STEP, HEAD_DIM), tl.float32), tl.zeros((STEP, HEAD_DIM), tl.float32)
    HEADS_PER_KV: tl.constexpr = HEADS // KV_HEADS
    q_at = (tl.arange(0, ROWS)[:, None] * HEADS + kv_head * HEADS_PER_KV) * HEAD_DIM + at[None, :]
    stats_start = (kv_head * HEADS_PER_KV).to(tl.int64) * n_stats
    stats_start += (q_start // STATS_BLOCK + sequence) * STATS_BLOCK
    # Query r sees the keys up to offset + r.
    offset = k_length - q_length
    first = tl.maximum(0, block * STEP - offset) // ROWS * ROWS
    last_partial = tl.minimum(q_length, tl.maximum(first, (block + 1) * STEP - 1 - offset))
    partial = tl.cdiv(last_partial - first, ROWS) * HEADS_PER_KV
    factor = scale * _LOG2_E
    for index in range(partial):
        dk, dv = _accumulate_dkdv(
            dk, dv, k, v, q_ptr, dout_ptr, q_at, query_stats_ptr, q_start, stats_start, index, first,
            q_length, block * STEP - offset, n_stats, factor, HEADS, HEADS_PER_KV, HEAD_DIM, ROWS,
            STEP, True,
        )  # fmt: skip
    for index in range(partial, tl.cdiv(q_length - first, ROWS) * HEADS_PER_KV):
        dk, dv = _accumulate_dkdv(
            dk, dv, k, v, q_ptr, dout_ptr, q_at, query_stats_ptr, q_start, stats_start, index, first,
            q_length, block * STEP - offset, n_stats, factor, HEADS, HEADS_PER_KV, HEAD_DIM, ROWS,
            STEP, False,
        )  # fmt: skip
    tl.store(dk_ptr + kv_at, (dk * scale).to(k.dtype), mask=inside)
    tl.store(dv_ptr + kv_at, dv.to(v.dtype), mask=inside)


def flash_backward(
    dout_THD: Tensor, q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, out_THD: Tensor,
    lse_HT: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_queries: int, max_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, from the inputs and outputs of `flash_forward`."""
    n, n_heads, head_dim = q_THD.shape
    n_kv_heads, n_sequences = k_LKD.shape[1], len(cu_seqlens_q) - 1
    dq_tile, dkdv_tile = NARROW_TILES if head_dim <= 64 else WIDE_TILES
    fewer_stages = device_traits(q_THD.device).has_small_shared_memory
    dq_THD, dk_LKD, dv_LKD = map(torch.empty_like, (q_THD, k_LKD, v_LKD))
    stats_block = dq_tile.rows
    n_stats = (n // stats_block + n_sequences) * stats_block
    shape = {
        "HEADS": n_heads, "KV_HEADS": n_kv_heads, "HEAD_DIM": head_dim, "STATS_BLOCK": stats_block,
    }  # fmt: skip
    # Per query: its log-sum-exp, and delta = sum(out * dout).
    query_stats = torch.empty(n_heads, n_stats, 2, dtype=torch.float32, device=q_THD.device)
    _dq_kernel[(n_heads, n_sequences, triton.cdiv(max_queries, dq_tile.rows))](
        dout_THD, q_THD, k_LKD, v_LKD, out_THD, lse_HT, dq_THD, query_stats, cu_seqlens_q,
        cu_seqlens_k, head_dim**-0.5, n, n_stats, **shape, ROWS=dq_tile.rows, STEP=dq_tile.keys,
        num_warps=dq_tile.warps, num_stages=dq_tile.stages - fewer_stages,
    )  # fmt: skip
    _dkdv_kernel[(n_kv_heads, n_sequences, triton.cdiv(max_keys, dkdv_tile.keys))](
        dout_THD, q_THD, k_LKD, v_LKD, query_stats, dk_LKD, dv_LKD, cu_seqlens_q, cu_seqlens_k,
        head_dim**-0.5, n_stats, **shape, ROWS=dkdv_tile.rows, STEP=dkdv_tile.keys,
        num_warps=dkdv_tile.warps, num_stages=dkdv_tile.stages - fewer_stages,
    )  # fmt: skip
    return dq_THD, dk_LKD, dv_LKD


@triton.jit
def _sum_shared_rows_kernel(
    taken_ptr, starts_ptr, places_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        place = tl.load(places_ptr + index).to(tl.int64)
        total += tl.load(taken_ptr + place * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_shared_rows(taken_LX: Tensor, starts_R: Tensor, places_L: Tensor) -> Tensor:
    """Row r is the sum of `taken[places[starts[r]:starts[r+1]]]`, always in that order."""
    n, width = len(starts_R) - 1, taken_LX[0].numel()
    out = taken_LX.new_empty(n, *taken_LX.shape[1:])
    _sum_shared_rows_kernel[(n,)](
        taken_LX, starts_R, places_L, out, WIDTH=width, BLOCK=triton.next_power_of_2(width)
    )
    return out
