"""Triton kernels of paged attention: prefill, and decoding with shared prefixes (cascade).

Every kernel processes keys in the blocks and the order of the learner's forward pass, so the output
has the same bits, however many sequences share a prefix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyfleet.engines.cuda.prefix_groups import GROUP_SIZE, PrefixGroups
from skyfleet.models.fused.head_layout import KEY_BLOCK
from skyfleet.models.fused.triton_flash_attention import online_softmax_update


@triton.jit
def kv_cells(
    block_table_ptr, row, block_table_width, token, visible, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Offsets of the keys and values of a sequence's tokens in the KV cache."""
    block_at = block_table_ptr + row * block_table_width + token // BLOCK_SIZE
    block = tl.load(block_at, mask=visible, other=0)
    return ((block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM


@triton.jit
def _shared_prefix_kernel(
    q_ptr, keys_ptr, values_ptr, members_ptr, group_shared_len_ptr, block_table_ptr,
    block_table_width, lse_max_ptr, lse_sum_ptr, out_ptr, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr, ROWS_PER_MEMBER: tl.constexpr, GROUP_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group, kv_head = tl.program_id(0), tl.program_id(1)
    n_tokens = tl.load(group_shared_len_ptr + group)
    if n_tokens == 0:
        return
    row = tl.arange(0, GROUP_SIZE * ROWS_PER_MEMBER)
    slot = tl.load(members_ptr + group * GROUP_SIZE + row // ROWS_PER_MEMBER)
    valid = (slot >= 0) & (row % ROWS_PER_MEMBER < HEADS_PER_KV)
    at = tl.arange(0, HEAD_DIM)
    head_at = slot.to(tl.int64) * HEADS + kv_head * HEADS_PER_KV + row % ROWS_PER_MEMBER
    q_at = head_at[:, None] * HEAD_DIM + at[None, :]
    q = tl.load(q_ptr + q_at, mask=valid[:, None], other=0.0)
    first = tl.load(members_ptr + group * GROUP_SIZE)
    row_max = tl.full((GROUP_SIZE * ROWS_PER_MEMBER,), -1e30, tl.float32)
    row_sum = tl.zeros((GROUP_SIZE * ROWS_PER_MEMBER,), tl.float32)
    acc = tl.zeros((GROUP_SIZE * ROWS_PER_MEMBER, HEAD_DIM), tl.float32)
    for start in range(0, n_tokens, KEY_BLOCK):
        token = start + tl.arange(0, KEY_BLOCK)
        visible = token < n_tokens
        cell = kv_cells(
            block_table_ptr, first, block_table_width, token, visible, kv_head,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        k = tl.load(keys_ptr + cell[:, None] + at[None, :])
        v = tl.load(values_ptr + cell[:, None] + at[None, :])
        row_max, row_sum, acc = online_softmax_update(
            q, k, v, valid[:, None] & visible[None, :], row_max, row_sum, acc, scale, PRECISION
        )
    tl.store(lse_max_ptr + head_at, row_max, mask=valid)
    tl.store(lse_sum_ptr + head_at, row_sum, mask=valid)
    tl.store(out_ptr + q_at, acc, mask=valid[:, None])


@triton.jit
def _paged_decode_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, lengths_ptr, active_ptr, block_table_ptr,
    block_table_width, shared_len_ptr, lse_max_ptr, lse_sum_ptr, partial_out_ptr, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr, ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, SHARES_PREFIXES: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0), tl.program_id(1)
    active = tl.load(active_ptr + row)
    length = tl.where(active != 0, tl.load(lengths_ptr + row) + 1, 0)
    query = tl.arange(0, ROWS)
    at = tl.arange(0, HEAD_DIM)
    valid = query < HEADS_PER_KV
    head_at = row.to(tl.int64) * HEADS + kv_head * HEADS_PER_KV + query
    q_at = head_at[:, None] * HEAD_DIM + at[None, :]
    q = tl.load(q_ptr + q_at, mask=valid[:, None], other=0.0)
    row_max = tl.full((ROWS,), -1e30, tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    shared_len = 0
    if SHARES_PREFIXES:
        shared_len = tl.load(shared_len_ptr + row)
        if shared_len > 0:
            row_max = tl.load(lse_max_ptr + head_at, mask=valid, other=-1e30)
            row_sum = tl.load(lse_sum_ptr + head_at, mask=valid, other=0.0)
            acc = tl.load(partial_out_ptr + q_at, mask=valid[:, None], other=0.0)
    for start in range(shared_len, length, KEY_BLOCK):
        token = start + tl.arange(0, KEY_BLOCK)
        visible = token < length
        cell = kv_cells(
            block_table_ptr, row, block_table_width, token, visible, kv_head,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        k = tl.load(keys_ptr + cell[:, None] + at[None, :], mask=visible[:, None], other=0.0)
        v = tl.load(values_ptr + cell[:, None] + at[None, :], mask=visible[:, None], other=0.0)
        row_max, row_sum, acc = online_softmax_update(
            q, k, v, visible[None, :] & valid[:, None], row_max, row_sum, acc, scale, PRECISION
        )
    acc = acc / tl.maximum(row_sum, 1e-30)[:, None]
    tl.store(out_ptr + q_at, acc.to(q.dtype), mask=valid[:, None])


def paged_decode_attention(
    q_NHD: Tensor, keys: Tensor, values: Tensor, lengths_N: Tensor, active_N: Tensor,
    block_table_NM: Tensor, groups: PrefixGroups | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query per slot over its KV blocks, its own token included [N, H, D]."""
    n, n_heads, head_dim = q_NHD.shape
    block_size, n_kv, _ = keys.shape[1:]
    out_NHD = torch.empty_like(q_NHD)
    heads_per_kv = n_heads // n_kv
    exact = q_NHD.dtype == torch.float32
    # For the same bits as in prefill, whose tensor cores take 64 rows at once.
    rows = 16 if exact else 64
    shape = {
        "HEADS": n_heads, "KV_HEADS": n_kv, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size,
        "HEADS_PER_KV": heads_per_kv, "KEY_BLOCK": KEY_BLOCK,
        "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip
    scale, block_table_width = head_dim**-0.5, block_table_NM.shape[1]
    if groups is not None:
        _shared_prefix_kernel[(n, n_kv)](
            q_NHD, keys, values, groups.members_SZ, groups.group_shared_len_S, block_table_NM,
            block_table_width, groups.lse_max_SH, groups.lse_sum_SH, groups.out_SHD, scale,
            ROWS_PER_MEMBER=max(4, triton.next_power_of_2(heads_per_kv)), GROUP_SIZE=GROUP_SIZE,
            **shape, num_warps=4, num_stages=2,
        )  # fmt: skip
    state = (q_NHD,) * 4  # unused without groups
    if groups is not None:
        state = (groups.shared_len_S, groups.lse_max_SH, groups.lse_sum_SH, groups.out_SHD)
    _paged_decode_kernel[(n, n_kv)](
        q_NHD, keys, values, out_NHD, lengths_N, active_N, block_table_NM, block_table_width,
        *state, scale,
        ROWS=max(rows, triton.next_power_of_2(heads_per_kv)), SHARES_PREFIXES=groups is not None,
        **shape, num_warps=4, num_stages=1 if groups is not None and head_dim > 64 else 2,
    )  # fmt: skip
    return out_NHD


@triton.jit
def _paged_prefill_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, tiles_ptr, blocks_ptr, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_ptr, head = tiles_ptr + tl.program_id(0) * 4, tl.program_id(1)
    n_rows = tl.load(tile_ptr + 1)
    if n_rows == 0:
        return
    first_row, position, blocks_at = (
        tl.load(tile_ptr),
        tl.load(tile_ptr + 2),
        tl.load(tile_ptr + 3),
    )
    row = tl.arange(0, ROWS)
    valid = row < n_rows
    at = tl.arange(0, HEAD_DIM)
    q_at = ((first_row + row).to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + at[None, :]
    q = tl.load(q_ptr + q_at, mask=valid[:, None], other=0.0)
    row_max = tl.full((ROWS,), -1e30, tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    # The last row sees itself.
    n_keys = position + n_rows
    for start in range(0, n_keys, KEY_BLOCK):
        token = start + tl.arange(0, KEY_BLOCK)
        inside = token < n_keys
        cell = kv_cells(
            blocks_ptr + blocks_at, 0, 0, token, inside, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE
        )
        k = tl.load(keys_ptr + cell[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(values_ptr + cell[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        visible = token[None, :] <= (position + row)[:, None]
        row_max, row_sum, acc = online_softmax_update(
            q, k, v, visible, row_max, row_sum, acc, scale, PRECISION
        )
    acc = acc / tl.maximum(row_sum, 1e-30)[:, None]
    tl.store(out_ptr + q_at, acc.to(q.dtype), mask=valid[:, None])


def paged_prefill_attention(
    q_THD: Tensor, keys: Tensor, values: Tensor, tiles_B4: Tensor, blocks_P: Tensor, rows: int
) -> Tensor:
    """Causal attention of new tokens over the KV blocks of their sequences [T, H, D].

    A tile is at most `rows` consecutive queries of one sequence: the row of the first, their
    number, the position of the first, and the index of the sequence's first block in `blocks_P`.
    """
    _, n_heads, head_dim = q_THD.shape
    block_size, n_kv, _ = keys.shape[1:]
    out_THD = torch.empty_like(q_THD)
    exact = q_THD.dtype == torch.float32
    _paged_prefill_kernel[(len(tiles_B4), n_heads)](
        q_THD, keys, values, out_THD, tiles_B4, blocks_P, head_dim**-0.5,
        HEADS=n_heads, KV_HEADS=n_kv, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, ROWS=rows,
        KEY_BLOCK=KEY_BLOCK, PRECISION="ieee" if exact else "tf32", num_warps=4 if exact else 8,
        # The block table lookup takes two stages; wide heads leave room for only one program anyway.
        num_stages=5 if head_dim > 64 and not exact else 3,
    )  # fmt: skip
    return out_THD
