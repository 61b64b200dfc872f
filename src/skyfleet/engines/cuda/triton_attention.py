"""Triton kernels of attention over pages: shared beginnings first, then each sequence's own.

Blocks of keys are met in the order in which a prompt's are, so the bits are the same however many
sequences meet them together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyfleet.engines.cuda.prefix_groups import SEATS, STEP, Kin
from skyfleet.models.fused.triton_products import meet_keys


@triton.jit
def page_cells(table_ptr, row, table_width, token, seen, kv_head, KV_HEADS: tl.constexpr,
               WIDTH: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Where the keys and values of these tokens of a sequence stand."""
    page = tl.load(table_ptr + row * table_width + token // PAGE, mask=seen, other=0)
    return ((page.to(tl.int64) * PAGE + token % PAGE) * KV_HEADS + kv_head) * WIDTH


@triton.jit
def _share_kernel(
    q_ptr, keys_ptr, values_ptr, members_ptr, shared_ptr, table_ptr, table_width,
    most_ptr, total_ptr, out_ptr, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, EACH: tl.constexpr, SEATS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    cluster, kv_head = tl.program_id(0), tl.program_id(1)
    n_tokens = tl.load(shared_ptr + cluster)
    if n_tokens == 0:
        return
    row = tl.arange(0, SEATS * EACH)
    slot = tl.load(members_ptr + cluster * SEATS + row // EACH)
    here = (slot >= 0) & (row % EACH < GROUP)
    at = tl.arange(0, WIDTH)
    head_at = slot.to(tl.int64) * HEADS + kv_head * GROUP + row % EACH
    q_at = head_at[:, None] * WIDTH + at[None, :]
    q = tl.load(q_ptr + q_at, mask=here[:, None], other=0.0)
    first = tl.load(members_ptr + cluster * SEATS)
    most = tl.full((SEATS * EACH,), -1e30, tl.float32)
    total = tl.zeros((SEATS * EACH,), tl.float32)
    out = tl.zeros((SEATS * EACH, WIDTH), tl.float32)
    for start in range(0, n_tokens, STEP):
        token = start + tl.arange(0, STEP)
        seen = token < n_tokens
        cell = page_cells(
            table_ptr, first, table_width, token, seen, kv_head, KV_HEADS, WIDTH, PAGE
        )
        k = tl.load(keys_ptr + cell[:, None] + at[None, :])
        v = tl.load(values_ptr + cell[:, None] + at[None, :])
        most, total, out = meet_keys(
            q, k, v, here[:, None] & seen[None, :], most, total, out, scale, PRECISION
        )
    tl.store(most_ptr + head_at, most, mask=here)
    tl.store(total_ptr + head_at, total, mask=here)
    tl.store(out_ptr + q_at, out, mask=here[:, None])


@triton.jit
def _attend_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, lengths_ptr, active_ptr, table_ptr, table_width,
    met_ptr, most_ptr, total_ptr, taken_ptr, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0), tl.program_id(1)
    active = tl.load(active_ptr + row)
    length = tl.where(active != 0, tl.load(lengths_ptr + row) + 1, 0)
    group = tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    here = group < GROUP
    head_at = row.to(tl.int64) * HEADS + kv_head * GROUP + group
    q_at = head_at[:, None] * WIDTH + at[None, :]
    q = tl.load(q_ptr + q_at, mask=here[:, None], other=0.0)
    most = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    met = 0
    if SHARES:
        met = tl.load(met_ptr + row)
        if met > 0:
            most = tl.load(most_ptr + head_at, mask=here, other=-1e30)
            total = tl.load(total_ptr + head_at, mask=here, other=0.0)
            out = tl.load(taken_ptr + q_at, mask=here[:, None], other=0.0)
    for start in range(met, length, STEP):
        token = start + tl.arange(0, STEP)
        seen = token < length
        cell = page_cells(table_ptr, row, table_width, token, seen, kv_head, KV_HEADS, WIDTH, PAGE)
        k = tl.load(keys_ptr + cell[:, None] + at[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(values_ptr + cell[:, None] + at[None, :], mask=seen[:, None], other=0.0)
        most, total, out = meet_keys(
            q, k, v, seen[None, :] & here[:, None], most, total, out, scale, PRECISION
        )
    out = out / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_ptr + q_at, out.to(q.dtype), mask=here[:, None])


def attend(
    q_NHD: Tensor, keys: Tensor, values: Tensor, lengths_N: Tensor, active_N: Tensor,
    table_NM: Tensor, kin: Kin | None = None,
) -> Tensor:  # fmt: skip
    """What each query takes from its own pages, the token just placed included [N, H, D]."""
    n, n_heads, width = q_NHD.shape
    page, n_kv, _ = keys.shape[1:]
    out_NHD = torch.empty_like(q_NHD)
    group = n_heads // n_kv
    exact = q_NHD.dtype == torch.float32
    # The bits must be those of the kernel that reads prompts, whose tensor cores take 64 rows at once.
    rows = 16 if exact else 64
    shape = {
        "HEADS": n_heads, "KV_HEADS": n_kv, "WIDTH": width, "PAGE": page, "GROUP": group,
        "STEP": STEP, "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip
    scale, table_width = width**-0.5, table_NM.shape[1]
    if kin is not None:
        _share_kernel[(n, n_kv)](
            q_NHD, keys, values, kin.members_SZ, kin.shared_S, table_NM, table_width,
            kin.most_SH, kin.total_SH, kin.out_SHD, scale,
            EACH=max(4, triton.next_power_of_2(group)), SEATS=SEATS, **shape,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    state = (q_NHD,) * 4 if kin is None else (kin.met_S, kin.most_SH, kin.total_SH, kin.out_SHD)
    _attend_kernel[(n, n_kv)](
        q_NHD, keys, values, out_NHD, lengths_N, active_N, table_NM, table_width, *state, scale,
        ROWS=max(rows, triton.next_power_of_2(group)), SHARES=kin is not None, **shape,
        num_warps=4, num_stages=1 if kin is not None and width > 64 else 2,
    )  # fmt: skip
    return out_NHD
