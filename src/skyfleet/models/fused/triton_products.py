"""Triton kernels whose every row is the same bits whatever else is in the batch.

A row of a matrix product is summed in one order however many rows there are, and a query meets its
keys in the same blocks whether it is read in a prompt, decoded, or learnt from. So a learner gives
a sampled token the very logprob that the engine gave it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, pad
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from skyfleet.models.fused.shapes import KEY_BLOCK

STEP = 64
"""How deep a block is, whatever its tile: every row is summed in steps of so much."""


class Card(NamedTuple):
    fetches: bool
    """Blocks by a copy engine, which cards have since Hopper."""
    is_small: bool
    """Its multiprocessors hold less than the tiles below want: they keep one block fewer in flight."""


@cache
def card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(fetches=True, is_small=False)
    held_bytes = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    major, _ = torch.cuda.get_device_capability(device)
    return Card(fetches=major >= 9, is_small=held_bytes < 160_000)


def blocks(x_NE: Tensor, n: int) -> TensorDescriptor:
    """As Hopper's copy engine fetches them, `n` rows at a time; its rows are multiples of 16 bytes."""
    if short := -x_NE.shape[1] % 8:
        x_NE = pad(x_NE, (0, short))
    return TensorDescriptor.from_tensor(x_NE.contiguous(), [n, STEP])


# Every kernel takes seconds to compile: one for all sizes, where size does not matter.
@triton.jit(do_not_specialize=["n_rows"])
def _product_kernel(
    x, weight, bias_ptr, out_ptr, n_rows, n_columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, BAND: tl.constexpr,
    BIASED: tl.constexpr, FETCHES: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time take a band of rows: they share what they load.
    program = tl.program_id(0)
    across = tl.cdiv(n_columns, COLUMNS)
    down = tl.cdiv(n_rows, ROWS)
    first = program // (BAND * across) * BAND
    height = min(down - first, BAND)
    row_block = first + program % (BAND * across) % height
    column_block = program % (BAND * across) // height
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, STEP):
        if FETCHES:  # what lies outside is read as 0
            x_block = x.load([row_block * ROWS, start])
            weight_block = weight.load([column_block * COLUMNS, start])
        else:
            at = start + tl.arange(0, STEP)[None, :]
            x_row = tl.minimum(row_block * ROWS + tl.arange(0, ROWS), n_rows - 1).to(tl.int64)
            weight_row = tl.minimum(column_block * COLUMNS + tl.arange(0, COLUMNS), n_columns - 1)
            x_at = x + x_row[:, None] * depth + at
            weight_at = weight + weight_row.to(tl.int64)[:, None] * depth + at
            x_block = tl.load(x_at, mask=at < depth, other=0.0)
            weight_block = tl.load(weight_at, mask=at < depth, other=0.0)
        total = tl.dot(x_block, weight_block.T, total)
    row = row_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = column_block.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    if BIASED:
        bias = tl.load(bias_ptr + tl.minimum(column, n_columns - 1)).to(tl.float32)
        total += bias[None, :]
    inside = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    out_at = out_ptr + row[:, None] * n_columns + column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)


def product(
    x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """`x @ weight.T + bias`, summed in float32 and rounded once to `dtype`.

    Of float32 it is cuBLAS's: what batches change there is a millionth, and no tile would fit.
    """
    if x_TE.dtype == torch.float32:
        return linear(x_TE, weight_FE, bias_F)
    n_rows, depth = x_TE.shape
    n_columns = len(weight_FE)
    out_TF = torch.empty(n_rows, n_columns, dtype=dtype, device=x_TE.device)
    if n_rows == 0:
        return out_TF
    card = card_of(x_TE.device)
    rows, columns, warps, stages = _tile(n_rows, n_columns, depth)
    _product_kernel[(triton.cdiv(n_rows, rows) * triton.cdiv(n_columns, columns),)](
        blocks(x_TE, rows) if card.fetches else x_TE.contiguous(),
        blocks(weight_FE, columns) if card.fetches else weight_FE,
        weight_FE if bias_F is None else bias_F, out_TF, n_rows, n_columns, depth,
        ROWS=rows, COLUMNS=columns, STEP=STEP, BAND=8, BIASED=bias_F is not None,
        FETCHES=card.fetches, num_warps=warps, num_stages=stages - card.is_small,
    )  # fmt: skip
    return out_TF


def _tile(n_rows: int, n_columns: int, depth: int) -> tuple[int, int, int, int]:
    """Rows, columns, warps and stages: measured on an H200, and the same bits whichever it is."""
    if n_rows <= 64:
        columns = 32 if n_columns <= 2048 else 64 if n_columns <= 8192 else 256
        return (64, columns, 4, 4 if columns == 256 else 6)
    if n_rows >= 4096 and depth >= 1024:
        return (256, 128, 8, 4)
    if triton.cdiv(n_rows, 128) * triton.cdiv(n_columns, 128) >= 150:
        return (128, 128, 4, 4 if depth >= 2048 else 3)
    # Smaller ones, so that every multiprocessor has work.
    n_tiles = triton.cdiv(n_rows, 128) * triton.cdiv(n_columns, 64)
    return (128 if n_tiles >= 70 else 64, 64, 4, 6)


@triton.jit
def meet_keys(q, k, v, seen, most, total, out, scale, PRECISION: tl.constexpr):
    """One block of keys and values, seen or not, added to what queries took so far."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(seen, scores, -1e30)
    highest = tl.maximum(most, tl.max(scores, axis=1))
    fade = tl.exp(most - highest)
    weights = tl.where(seen, tl.exp(scores - highest[:, None]), 0.0)
    total = total * fade + tl.sum(weights, axis=1)
    out = tl.dot(weights.to(v.dtype), v, out * fade[:, None], input_precision=PRECISION)
    return highest, total, out


@triton.jit(do_not_specialize=["n_queries"])
def _read_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, total_ptr, q_ends_ptr, k_ends_ptr, scale, n_queries,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_start, k_start = tl.load(q_ends_ptr + sequence), tl.load(k_ends_ptr + sequence)
    q_length = tl.load(q_ends_ptr + sequence + 1) - q_start
    k_length = tl.load(k_ends_ptr + sequence + 1) - k_start
    if block * ROWS >= q_length:
        return
    row = block * ROWS + tl.arange(0, ROWS)
    here = row < q_length
    # The last query sees every key.
    position = k_length - q_length + row
    at = tl.arange(0, WIDTH)
    q_at = ((q_start + row).to(tl.int64)[:, None] * HEADS + head) * WIDTH + at[None, :]
    q = tl.load(q_ptr + q_at, mask=here[:, None], other=0.0)
    most = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    stop = tl.minimum(k_length, k_length - q_length + (block + 1) * ROWS)
    for start in range(0, stop, STEP):
        token = start + tl.arange(0, STEP)
        inside = token < k_length
        cell = ((k_start + token).to(tl.int64) * KV_HEADS + kv_head) * WIDTH
        k = tl.load(k_ptr + cell[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + cell[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        seen = token[None, :] <= position[:, None]
        most, total, out = meet_keys(q, k, v, seen, most, total, out, scale, "tf32")
    out = out / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_ptr + q_at, out.to(q.dtype), mask=here[:, None])
    logarithm = most + tl.log(tl.maximum(total, 1e-30))
    tl.store(total_ptr + head.to(tl.int64) * n_queries + q_start + row, logarithm, mask=here)


def read(
    q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, q_ends: Tensor, k_ends: Tensor, most_queries: int
) -> tuple[Tensor, Tensor]:
    """What each query takes from the keys up to its own, and the logarithm of its mass [H, T]."""
    n, n_heads, width = q_THD.shape
    out_THD = torch.empty_like(q_THD)
    total_HT = torch.empty(n_heads, n, dtype=torch.float32, device=q_THD.device)
    rows = 128
    _read_kernel[(triton.cdiv(most_queries, rows), n_heads, len(q_ends) - 1)](
        q_THD, k_LKD, v_LKD, out_THD, total_HT, q_ends, k_ends, width**-0.5, n,
        HEADS=n_heads, KV_HEADS=k_LKD.shape[1], WIDTH=width, ROWS=rows, STEP=KEY_BLOCK,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out_THD, total_HT
