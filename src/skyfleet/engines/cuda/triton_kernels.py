"""Triton kernels of one decoding step: RoPE with the KV write, and token sampling.

Each computes a row bit for bit as the learner's forward pass does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from skyfleet.models.fused.triton_kernels import rope_heads
from skyfleet.models.fused.triton_logprobs import NO_FP_FUSION, softmax_stats, token_logprob


@triton.jit
def _write_kv_kernel(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    lengths_ptr, active_ptr, block_table_ptr, block_table_width, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(lengths_ptr + row)
    active = tl.load(active_ptr + row) != 0
    block_at = block_table_ptr + row * block_table_width + position // BLOCK_SIZE
    block = tl.load(block_at, mask=active, other=0)
    cell = block.to(tl.int64) * BLOCK_SIZE + tl.where(active, position % BLOCK_SIZE, 0)
    x, rotated, is_q, is_k, is_v, head, at = rope_heads(
        qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, row, position,
        HEADS, KV_HEADS, HEAD_DIM, ROWS, NORMED,
    )  # fmt: skip
    tl.store(q_ptr + (row * HEADS + head) * HEAD_DIM + at, rotated, mask=is_q)
    tl.store(keys_ptr + (cell * KV_HEADS + head - HEADS) * HEAD_DIM + at, rotated, mask=is_k)
    tl.store(values_ptr + (cell * KV_HEADS + head - HEADS - KV_HEADS) * HEAD_DIM + at, x, mask=is_v)


def write_kv(
    qkv_NX: Tensor, keys: Tensor, values: Tensor, cos_PD: Tensor, sin_PD: Tensor,
    norms: tuple[Tensor, Tensor] | None, lengths_N: Tensor, active_N: Tensor,
    block_table_NM: Tensor, *, eps: float,
) -> Tensor:  # fmt: skip
    """Apply RoPE, write keys and values into their KV blocks, and return the queries.

    `keys` and `values` are one layer's blocks [blocks, BLOCK_SIZE, K, D]. Inactive slots write to
    block 0, the null block.
    """
    block_size, n_kv, head_dim = keys.shape[1:]
    n = len(qkv_NX)
    n_heads = qkv_NX.shape[1] // head_dim - 2 * n_kv
    q_NHD = qkv_NX.new_empty(n, n_heads, head_dim)
    q_norm, k_norm = norms or (cos_PD, cos_PD)
    _write_kv_kernel[(n,)](
        qkv_NX, q_NHD, keys, values, cos_PD, sin_PD, q_norm, k_norm,
        lengths_N, active_N, block_table_NM, block_table_NM.shape[1], eps,
        HEADS=n_heads, KV_HEADS=n_kv, HEAD_DIM=head_dim,
        ROWS=triton.next_power_of_2(n_heads + 2 * n_kv), BLOCK_SIZE=block_size,
        NORMED=norms is not None,
    )  # fmt: skip
    return q_NHD


@triton.jit
def _sample_token_kernel(
    logits_ptr, slots_ptr, vocabulary, inv_temperatures_ptr, uniforms_ptr, uniforms_width,
    stop_ids_ptr, tokens_ptr, lengths_ptr, active_ptr, n_generated_ptr, max_new_tokens_ptr,
    step_ptr, out_tokens_ptr, out_logprobs_ptr, rows,
    N_STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    at = tl.arange(0, BLOCK)
    base = logits_ptr + row.to(tl.int64) * vocabulary
    given = tl.load(inv_temperatures_ptr + slot)
    greedy = given == 0.0
    factor = tl.where(greedy, 1.0, given)
    top, mass_sum, _ = softmax_stats(base, factor, vocabulary, BLOCK)
    n_generated = tl.load(n_generated_ptr + slot)
    uniform = tl.load(uniforms_ptr + slot.to(tl.int64) * uniforms_width + n_generated)
    # Greedy sampling takes the first of equally likely tokens, as argmax does.
    target = tl.where(greedy, 0.0, (uniform * mass_sum).to(tl.float32))
    before = 0.0
    token = -1
    last = 0
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(base + start + at, mask=start + at < vocabulary, other=-float("inf"))
        x = x.to(tl.float32) * factor
        mass = tl.exp(x - top)
        if greedy:
            mass = tl.where(x == top, 1.0, 0.0)
        cumulative = before + tl.cumsum(mass, axis=0)
        passed = (cumulative > target) & (mass > 0)
        first = tl.min(tl.where(passed, start + at, vocabulary), axis=0)
        token = tl.where((token < 0) & (first < vocabulary), first, token)
        likely = tl.max(tl.where(mass > 0, start + at, -1), axis=0)
        last = tl.maximum(last, likely)
        before += tl.sum(mass, axis=0)
    token = tl.where(token < 0, last, token)
    logprob = token_logprob(base, token, factor, top, mass_sum)
    logprob = tl.where(greedy, 0.0, logprob)
    active = tl.load(active_ptr + slot) != 0
    step = tl.load(step_ptr)
    tl.store(out_tokens_ptr + step * rows + slot, tl.where(active, token, -1))
    tl.store(out_logprobs_ptr + step * rows + slot, logprob)
    if active:
        tl.store(tokens_ptr + slot, token.to(tl.int64))
        tl.store(lengths_ptr + slot, tl.load(lengths_ptr + slot) + 1)
        tl.store(n_generated_ptr + slot, n_generated + 1)
        stops = tl.load(stop_ids_ptr + slot * N_STOPS + tl.arange(0, N_STOPS))
        stopped = tl.max((stops == token).to(tl.int32), axis=0)
        full = (n_generated + 1 >= tl.load(max_new_tokens_ptr + slot)).to(tl.int32)
        tl.store(active_ptr + slot, 1 - tl.maximum(stopped, full))


def sample_token(
    logits_MV: Tensor, slots_M: Tensor, *, inv_temperatures_S: Tensor, uniforms_SW: Tensor,
    stop_ids_SZ: Tensor, tokens_S: Tensor, lengths_S: Tensor, active_S: Tensor,
    n_generated_S: Tensor, max_new_tokens_S: Tensor, step_1: Tensor, out_tokens_KS: Tensor,
    out_logprobs_KS: Tensor,
) -> None:  # fmt: skip
    """Sample the next token of each slot in `slots_M`, append it, and deactivate finished slots.

    One uniform number decides one token: the first whose cumulative probability exceeds it. An
    inverse temperature of 0 is greedy.
    """
    m, vocabulary = logits_MV.shape
    _sample_token_kernel[(m,)](
        logits_MV, slots_M, vocabulary, inv_temperatures_S, uniforms_SW, uniforms_SW.shape[1],
        stop_ids_SZ, tokens_S, lengths_S, active_S, n_generated_S, max_new_tokens_S, step_1,
        out_tokens_KS, out_logprobs_KS, out_tokens_KS.shape[1],
        N_STOPS=stop_ids_SZ.shape[1], BLOCK=4096, num_warps=8, **NO_FP_FUSION,
    )  # fmt: skip
