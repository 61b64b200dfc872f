"""Triton matrix multiplication whose rows have the same bits in any batch.

A row is summed in one order, however many rows there are. The learner therefore gives a sampled
token exactly the logprob that the engine gave it.
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

DEPTH_BLOCK = 64
"""Depth of a block, whatever its tile: every row is summed in steps of this size."""


class DeviceTraits(NamedTuple):
    has_tma: bool
    """Has a tensor memory accelerator (Hopper and newer)."""
    has_small_shared_memory: bool
    """Has less shared memory than the tiles below need, so kernels pipeline one block fewer."""


@cache
def device_traits(device: torch.device) -> DeviceTraits:
    if device.type != "cuda":
        return DeviceTraits(has_tma=True, has_small_shared_memory=False)
    shared_bytes = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    major, _ = torch.cuda.get_device_capability(device)
    return DeviceTraits(has_tma=major >= 9, has_small_shared_memory=shared_bytes < 160_000)


def tma_blocks(x_NE: Tensor, n: int) -> TensorDescriptor:
    """A TMA descriptor that loads `n` rows at a time; TMA needs rows of multiples of 16 bytes."""
    if short := -x_NE.shape[1] % 8:
        x_NE = pad(x_NE, (0, short))
    return TensorDescriptor.from_tensor(x_NE.contiguous(), [n, DEPTH_BLOCK])


# A kernel takes seconds to compile: compile one for all sizes where the size does not matter.
@triton.jit(do_not_specialize=["n_rows"])
def _matmul_kernel(
    x, weight, bias_ptr, out_ptr, n_rows, n_columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH_BLOCK: tl.constexpr, BAND: tl.constexpr,
    BIASED: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time take one band of rows, so they share their loads.
    program = tl.program_id(0)
    n_column_blocks = tl.cdiv(n_columns, COLUMNS)
    n_row_blocks = tl.cdiv(n_rows, ROWS)
    first = program // (BAND * n_column_blocks) * BAND
    band_height = min(n_row_blocks - first, BAND)
    row_block = first + program % (BAND * n_column_blocks) % band_height
    column_block = program % (BAND * n_column_blocks) // band_height
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH_BLOCK):
        if USE_TMA:  # reads 0 outside the tensor
            x_block = x.load([row_block * ROWS, start])
            weight_block = weight.load([column_block * COLUMNS, start])
        else:
            at = start + tl.arange(0, DEPTH_BLOCK)[None, :]
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


def matmul(
    x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """`x @ weight.T + bias`, summed in float32 and rounded once to `dtype`.

    Float32 uses cuBLAS: there the batch changes a result by a millionth, and no tile would fit.
    """
    if x_TE.dtype == torch.float32:
        return linear(x_TE, weight_FE, bias_F)
    n_rows, depth = x_TE.shape
    n_columns = len(weight_FE)
    out_TF = torch.empty(n_rows, n_columns, dtype=dtype, device=x_TE.device)
    if n_rows == 0:
        return out_TF
    traits = device_traits(x_TE.device)
    rows, columns, warps, stages = _tile(n_rows, n_columns, depth)
    _matmul_kernel[(triton.cdiv(n_rows, rows) * triton.cdiv(n_columns, columns),)](
        tma_blocks(x_TE, rows) if traits.has_tma else x_TE.contiguous(),
        tma_blocks(weight_FE, columns) if traits.has_tma else weight_FE,
        weight_FE if bias_F is None else bias_F, out_TF, n_rows, n_columns, depth,
        ROWS=rows, COLUMNS=columns, DEPTH_BLOCK=DEPTH_BLOCK, BAND=8, BIASED=bias_F is not None,
        USE_TMA=traits.has_tma, num_warps=warps,
        num_stages=stages - traits.has_small_shared_memory,
    )  # fmt: skip
    return out_TF


def _tile(n_rows: int, n_columns: int, depth: int) -> tuple[int, int, int, int]:
    """Rows, columns, warps and stages, tuned on an H200. Every tile gives the same bits."""
    if n_rows <= 64:
        columns = 32 if n_columns <= 2048 else 64 if n_columns <= 8192 else 256
        return (64, columns, 4, 4 if columns == 256 else 6)
    if n_rows >= 4096 and depth >= 1024:
        return (256, 128, 8, 4)
    if triton.cdiv(n_rows, 128) * triton.cdiv(n_columns, 128) >= 150:
        return (128, 128, 4, 4 if depth >= 2048 else 3)
    # Smaller tiles, so that every multiprocessor has work.
    n_tiles = triton.cdiv(n_rows, 128) * triton.cdiv(n_columns, 64)
    return (128 if n_tiles >= 70 else 64, 64, 4, 6)
