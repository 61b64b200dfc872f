"""Triton kernel of attention while prompts are read: new tokens meet the pages of their sequences.

Blocks of keys are those of the learner's forward, so the bits are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyfleet.engines.cuda.prefix_groups import STEP
from skyfleet.engines.cuda.triton_attention import page_cells
from skyfleet.models.fused.triton_products import meet_keys


@triton.jit
def _read_pages_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, blocks_ptr, pages_ptr, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block_ptr, head = blocks_ptr + tl.program_id(0) * 4, tl.program_id(1)
    n_rows = tl.load(block_ptr + 1)
    if n_rows == 0:
        return
    first_row, position, pages_at = (
        tl.load(block_ptr),
        tl.load(block_ptr + 2),
        tl.load(block_ptr + 3),
    )
    row = tl.arange(0, ROWS)
    here = row < n_rows
    at = tl.arange(0, WIDTH)
    q_at = ((first_row + row).to(tl.int64)[:, None] * HEADS + head) * WIDTH + at[None, :]
    q = tl.load(q_ptr + q_at, mask=here[:, None], other=0.0)
    most = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    # The last row sees itself.
    n_keys = position + n_rows
    for start in range(0, n_keys, STEP):
        token = start + tl.arange(0, STEP)
        inside = token < n_keys
        cell = page_cells(pages_ptr + pages_at, 0, 0, token, inside, kv_head, KV_HEADS, WIDTH, PAGE)
        k = tl.load(keys_ptr + cell[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(values_ptr + cell[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        seen = token[None, :] <= (position + row)[:, None]
        most, total, out = meet_keys(q, k, v, seen, most, total, out, scale, PRECISION)
    out = out / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_ptr + q_at, out.to(q.dtype), mask=here[:, None])


def read_pages(
    q_THD: Tensor, keys: Tensor, values: Tensor, blocks_B4: Tensor, pages_P: Tensor, rows: int
) -> Tensor:
    """What each query takes from its sequence's pages, up to its own token [T, H, D].

    A block is at most `rows` consecutive queries of one sequence: the first's row, how many they are,
    its position, and where the sequence's pages begin among `pages`.
    """
    _, n_heads, width = q_THD.shape
    page, n_kv, _ = keys.shape[1:]
    out_THD = torch.empty_like(q_THD)
    exact = q_THD.dtype == torch.float32
    _read_pages_kernel[(len(blocks_B4), n_heads)](
        q_THD, keys, values, out_THD, blocks_B4, pages_P, width**-0.5,
        HEADS=n_heads, KV_HEADS=n_kv, WIDTH=width, PAGE=page, ROWS=rows, STEP=STEP,
        PRECISION="ieee" if exact else "tf32", num_warps=4 if exact else 8,
        # Looking up pages takes two of them; wide heads leave room for no second program anyway.
        num_stages=5 if width > 64 and not exact else 3,
    )  # fmt: skip
    return out_THD
