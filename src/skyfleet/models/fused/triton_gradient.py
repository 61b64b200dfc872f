"""Triton kernels of attention's gradient: each sum has one owner and one order, so the same bits.

One kernel owns queries and one owns keys; both compute the scores again. Nothing is added up between
programs, and what a sequence gets does not depend on its neighbours in the pack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyfleet.models.fused.triton_products import card_of

_LOG2_E = tl.constexpr(1.4426950408889634)


class Tile(NamedTuple):
    """How many queries and keys meet at once, and what a program may use for it."""

    rows: int
    step: int
    warps: int
    stages: int


NARROW = Tile(64, 32, 4, 3), Tile(32, 64, 4, 3)
WIDE = Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)
"""For the queries' kernel and for the keys', which takes no more rows at once than that one marked."""


@triton.jit
def _add_keys(
    dq, q, dout, total, delta, k_ptr, v_ptr, kv_at, k_start, start, position, k_length, factor,
    STRIDE: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one block of keys adds to the gradient of queries."""
    token = start + tl.arange(0, STEP)
    ahead = (k_start.to(tl.int64) + start) * STRIDE
    if MASKED:
        inside = (token < k_length)[:, None]
        k = tl.load(k_ptr + ahead + kv_at, mask=inside, other=0.0)
        v = tl.load(v_ptr + ahead + kv_at, mask=inside, other=0.0)
    else:
        k = tl.load(k_ptr + ahead + kv_at)
        v = tl.load(v_ptr + ahead + kv_at)
    share = tl.exp2(tl.dot(q, tl.trans(k)) * factor - total[:, None])
    if MASKED:
        share = tl.where(token[None, :] <= position[:, None], share, 0.0)
    dscores = share * (tl.dot(dout, tl.trans(v)) - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["n_queries"])
def _queries_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, total_ptr, dq_ptr, marks_ptr, q_ends_ptr, k_ends_ptr,
    scale, n_queries, n_marks, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(0), tl.program_id(1)
    # The last queries see the most keys: the longest work begins first.
    block = tl.num_programs(2) - 1 - tl.program_id(2)
    q_start, k_start = tl.load(q_ends_ptr + sequence), tl.load(k_ends_ptr + sequence)
    q_length = tl.load(q_ends_ptr + sequence + 1) - q_start
    k_length = tl.load(k_ends_ptr + sequence + 1) - k_start
    if block * ROWS >= q_length:
        return
    row = block * ROWS + tl.arange(0, ROWS)
    here = row < q_length
    at = tl.arange(0, WIDTH)
    q_at = ((q_start + row).to(tl.int64)[:, None] * HEADS + head) * WIDTH + at[None, :]
    q = tl.load(q_ptr + q_at, mask=here[:, None], other=0.0)
    dout = tl.load(dout_ptr + q_at, mask=here[:, None], other=0.0)
    out = tl.load(out_ptr + q_at, mask=here[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    total_at = total_ptr + head.to(tl.int64) * n_queries + q_start + row
    # A row that is not there takes no share of anything.
    total = tl.load(total_at, mask=here, other=float("inf")) * _LOG2_E
    # Every sequence has room for whole blocks.
    mark_at = head.to(tl.int64) * n_marks + (q_start // ROOM + sequence) * ROOM + row
    tl.store(marks_ptr + mark_at * 2, total)
    tl.store(marks_ptr + mark_at * 2 + 1, delta)
    kv_at = tl.arange(0, STEP)[:, None] * KV_HEADS + head // (HEADS // KV_HEADS)
    kv_at = kv_at * WIDTH + at[None, :]
    # The last query sees every key.
    position = k_length - q_length + row
    before = k_length - q_length + block * ROWS
    factor = scale * _LOG2_E
    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    seen_by_all = (before + 1) // STEP * STEP
    # In the other order ptxas lets no product begin before the last one ends.
    for start in range(seen_by_all, tl.minimum(k_length, before + ROWS), STEP):
        dq = _add_keys(
            dq, q, dout, total, delta, k_ptr, v_ptr, kv_at, k_start, start, position,
            k_length, factor, KV_HEADS * WIDTH, STEP, True,
        )  # fmt: skip
    for start in range(0, seen_by_all, STEP):
        dq = _add_keys(
            dq, q, dout, total, delta, k_ptr, v_ptr, kv_at, k_start, start, position,
            k_length, factor, KV_HEADS * WIDTH, STEP, False,
        )  # fmt: skip
    tl.store(dq_ptr + q_at, (dq * scale).to(q.dtype), mask=here[:, None])


@triton.jit
def _add_queries(
    dk, dv, k, v, q_ptr, dout_ptr, q_at, marks_ptr, q_start, marks_start, index, first, q_length,
    seen_from, n_marks, factor, HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one block of one head's queries adds to the gradients of the keys it sees."""
    head = index % GROUP
    begin = first + index // GROUP * ROWS
    row = begin + tl.arange(0, ROWS)
    here = (row < q_length)[:, None]
    ahead = ((q_start.to(tl.int64) + begin) * HEADS + head) * WIDTH
    q = tl.load(q_ptr + ahead + q_at, mask=here, other=0.0)
    dout = tl.load(dout_ptr + ahead + q_at, mask=here, other=0.0)
    mark_at = (marks_start + head * n_marks + begin) * 2 + tl.arange(0, 2 * ROWS)
    total, delta = tl.split(tl.reshape(tl.load(marks_ptr + mark_at), (ROWS, 2)))
    share = tl.exp2(tl.dot(k, tl.trans(q)) * factor - total[None, :])
    if MASKED:
        apart = tl.arange(0, STEP)[:, None] - tl.arange(0, ROWS)[None, :]
        share = tl.where(apart <= begin - seen_from, share, 0.0)
    dv = tl.dot(share.to(dout.dtype), dout, dv)
    dscores = share * (tl.dot(v, tl.trans(dout)) - delta[None, :])
    return tl.dot(dscores.to(q.dtype), q, dk), dv


@triton.jit
def _keys_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, marks_ptr, dk_ptr, dv_ptr, q_ends_ptr, k_ends_ptr, scale,
    n_marks, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    kv_head, sequence = tl.program_id(0), tl.program_id(1)
    q_start, k_start = tl.load(q_ends_ptr + sequence), tl.load(k_ends_ptr + sequence)
    q_length = tl.load(q_ends_ptr + sequence + 1) - q_start
    k_length = tl.load(k_ends_ptr + sequence + 1) - k_start
    # Counted from the end, where few queries see a key: the longest work begins first.
    block = tl.cdiv(k_length, STEP) - tl.num_programs(2) + tl.program_id(2)
    if block < 0:
        return
    token = block * STEP + tl.arange(0, STEP)
    inside = (token < k_length)[:, None]
    at = tl.arange(0, WIDTH)
    kv_at = ((k_start + token).to(tl.int64)[:, None] * KV_HEADS + kv_head) * WIDTH + at[None, :]
    k = tl.load(k_ptr + kv_at, mask=inside, other=0.0)
    v = tl.load(v_ptr + kv_at, mask=inside, other=0.0)
    dk, dv = tl.zeros((STEP, WIDTH), tl.float32), tl.zeros((STEP, WIDTH), tl.float32)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    q_at = (tl.arange(0, ROWS)[:, None] * HEADS + kv_head * GROUP) * WIDTH + at[None, :]
    marks_start = (kv_head * GROUP).to(tl.int64) * n_marks + (q_start // ROOM + sequence) * ROOM
    # Query r sees the keys up to offset + r.
    offset = k_length - q_length
    first = tl.maximum(0, block * STEP - offset) // ROWS * ROWS
    last_partial = tl.minimum(q_length, tl.maximum(first, (block + 1) * STEP - 1 - offset))
    partial = tl.cdiv(last_partial - first, ROWS) * GROUP
    factor = scale * _LOG2_E
    for index in range(partial):
        dk, dv = _add_queries(
            dk, dv, k, v, q_ptr, dout_ptr, q_at, marks_ptr, q_start, marks_start, index, first,
            q_length, block * STEP - offset, n_marks, factor, HEADS, GROUP, WIDTH, ROWS, STEP, True,
        )  # fmt: skip
    for index in range(partial, tl.cdiv(q_length - first, ROWS) * GROUP):
        dk, dv = _add_queries(
            dk, dv, k, v, q_ptr, dout_ptr, q_at, marks_ptr, q_start, marks_start, index, first,
            q_length, block * STEP - offset, n_marks, factor, HEADS, GROUP, WIDTH, ROWS, STEP, False,
        )  # fmt: skip
    tl.store(dk_ptr + kv_at, (dk * scale).to(k.dtype), mask=inside)
    tl.store(dv_ptr + kv_at, dv.to(v.dtype), mask=inside)


def read_back(
    dout_THD: Tensor, q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, out_THD: Tensor,
    total_HT: Tensor, q_ends: Tensor, k_ends: Tensor, most_queries: int, most_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of queries, keys and values, from what `read` was given and gave."""
    n, n_heads, width = q_THD.shape
    n_kv_heads, n_sequences = k_LKD.shape[1], len(q_ends) - 1
    of_queries, of_keys = NARROW if width <= 64 else WIDE
    is_small = card_of(q_THD.device).is_small
    dq_THD, dk_LKD, dv_LKD = map(torch.empty_like, (q_THD, k_LKD, v_LKD))
    room = of_queries.rows
    n_marks = (n // room + n_sequences) * room
    shape = {"HEADS": n_heads, "KV_HEADS": n_kv_heads, "WIDTH": width, "ROOM": room}
    # Of each query the logarithm of its mass and the mean of its shares' gradients, side by side.
    marks = torch.empty(n_heads, n_marks, 2, dtype=torch.float32, device=q_THD.device)
    _queries_kernel[(n_heads, n_sequences, triton.cdiv(most_queries, of_queries.rows))](
        dout_THD, q_THD, k_LKD, v_LKD, out_THD, total_HT, dq_THD, marks, q_ends, k_ends,
        width**-0.5, n, n_marks, **shape, ROWS=of_queries.rows, STEP=of_queries.step,
        num_warps=of_queries.warps, num_stages=of_queries.stages - is_small,
    )  # fmt: skip
    _keys_kernel[(n_kv_heads, n_sequences, triton.cdiv(most_keys, of_keys.step))](
        dout_THD, q_THD, k_LKD, v_LKD, marks, dk_LKD, dv_LKD, q_ends, k_ends,
        width**-0.5, n_marks, **shape, ROWS=of_keys.rows, STEP=of_keys.step,
        num_warps=of_keys.warps, num_stages=of_keys.stages - is_small,
    )  # fmt: skip
    return dq_THD, dk_LKD, dv_LKD
