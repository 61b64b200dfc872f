"""Triton kernels of one decoding step.

Each computes a row as the learner's forward does, to the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from skyfleet.models.fused.triton_kernels import turned_heads
from skyfleet.models.fused.triton_scores import UNFUSED, tempered_logprob, tempered_mass


@triton.jit
def _place_kernel(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    lengths_ptr, active_ptr, table_ptr, table_width, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(lengths_ptr + row)
    active = tl.load(active_ptr + row) != 0
    page = tl.load(table_ptr + row * table_width + position // PAGE, mask=active, other=0)
    slot = page.to(tl.int64) * PAGE + tl.where(active, position % PAGE, 0)
    x, turned, is_q, is_k, is_v, head, at = turned_heads(
        qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, row, position,
        HEADS, KV_HEADS, WIDTH, ROWS, NORMED,
    )  # fmt: skip
    tl.store(q_ptr + (row * HEADS + head) * WIDTH + at, turned, mask=is_q)
    tl.store(keys_ptr + (slot * KV_HEADS + head - HEADS) * WIDTH + at, turned, mask=is_k)
    tl.store(values_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * WIDTH + at, x, mask=is_v)


def place(
    qkv_NX: Tensor, keys: Tensor, values: Tensor, cos_PD: Tensor, sin_PD: Tensor,
    norms: tuple[Tensor, Tensor] | None, lengths_N: Tensor, active_N: Tensor, table_NM: Tensor,
    *, eps: float,
) -> Tensor:  # fmt: skip
    """Turns queries and keys to their positions, keeps keys and values in their pages; queries back.

    `keys` and `values` are one layer's pages [pages, PAGE, K, D]; page 0 takes what rests.
    """
    page, n_kv, width = keys.shape[1:]
    n = len(qkv_NX)
    n_heads = qkv_NX.shape[1] // width - 2 * n_kv
    q_NHD = qkv_NX.new_empty(n, n_heads, width)
    q_norm, k_norm = norms or (cos_PD, cos_PD)
    _place_kernel[(n,)](
        qkv_NX, q_NHD, keys, values, cos_PD, sin_PD, q_norm, k_norm,
        lengths_N, active_N, table_NM, table_NM.shape[1], eps,
        HEADS=n_heads, KV_HEADS=n_kv, WIDTH=width,
        ROWS=triton.next_power_of_2(n_heads + 2 * n_kv), PAGE=page, NORMED=norms is not None,
    )  # fmt: skip
    return q_NHD


@triton.jit
def _speak_kernel(
    logits_ptr, slots_ptr, vocabulary, factors_ptr, uniforms_ptr, uniforms_width, stops_ptr,
    tokens_ptr, lengths_ptr, active_ptr, said_ptr, most_ptr, step_ptr, out_tokens_ptr,
    out_logprobs_ptr, rows, STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    at = tl.arange(0, BLOCK)
    base = logits_ptr + row.to(tl.int64) * vocabulary
    given = tl.load(factors_ptr + slot)
    greedy = given == 0.0
    factor = tl.where(greedy, 1.0, given)
    top, total_all, _ = tempered_mass(base, factor, vocabulary, BLOCK)
    said = tl.load(said_ptr + slot)
    uniform = tl.load(uniforms_ptr + slot.to(tl.int64) * uniforms_width + said)
    # Of several likeliest tokens greed takes the first, as argmax does.
    target = tl.where(greedy, 0.0, (uniform * total_all).to(tl.float32))
    before = 0.0
    token = -1
    last = 0
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(base + start + at, mask=start + at < vocabulary, other=-float("inf"))
        x = x.to(tl.float32) * factor
        mass = tl.exp(x - top)
        if greedy:
            mass = tl.where(x == top, 1.0, 0.0)
        reached = before + tl.cumsum(mass, axis=0)
        passed = (reached > target) & (mass > 0)
        first = tl.min(tl.where(passed, start + at, vocabulary), axis=0)
        token = tl.where((token < 0) & (first < vocabulary), first, token)
        likely = tl.max(tl.where(mass > 0, start + at, -1), axis=0)
        last = tl.maximum(last, likely)
        before += tl.sum(mass, axis=0)
    token = tl.where(token < 0, last, token)
    logprob = tempered_logprob(base, token, factor, top, total_all)
    logprob = tl.where(greedy, 0.0, logprob)
    active = tl.load(active_ptr + slot) != 0
    step = tl.load(step_ptr)
    tl.store(out_tokens_ptr + step * rows + slot, tl.where(active, token, -1))
    tl.store(out_logprobs_ptr + step * rows + slot, logprob)
    if active:
        tl.store(tokens_ptr + slot, token.to(tl.int64))
        tl.store(lengths_ptr + slot, tl.load(lengths_ptr + slot) + 1)
        tl.store(said_ptr + slot, said + 1)
        stops = tl.load(stops_ptr + slot * STOPS + tl.arange(0, STOPS))
        stopped = tl.max((stops == token).to(tl.int32), axis=0)
        full = (said + 1 >= tl.load(most_ptr + slot)).to(tl.int32)
        tl.store(active_ptr + slot, 1 - tl.maximum(stopped, full))


def speak(
    logits_MV: Tensor, slots_M: Tensor, *, factors_S: Tensor, uniforms_SW: Tensor,
    stops_SZ: Tensor, tokens_S: Tensor, lengths_S: Tensor, active_S: Tensor, said_S: Tensor,
    most_S: Tensor, step_1: Tensor, out_tokens_KS: Tensor, out_logprobs_KS: Tensor,
) -> None:  # fmt: skip
    """Draws the next token of every slot named, notes it, and lets those rest that have finished.

    One uniform number decides one token: the first whose cumulative share passes it. A factor is
    one over the temperature, or 0 for greed.
    """
    m, vocabulary = logits_MV.shape
    _speak_kernel[(m,)](
        logits_MV, slots_M, vocabulary, factors_S, uniforms_SW, uniforms_SW.shape[1], stops_SZ,
        tokens_S, lengths_S, active_S, said_S, most_S, step_1, out_tokens_KS, out_logprobs_KS,
        out_tokens_KS.shape[1], STOPS=stops_SZ.shape[1], BLOCK=4096, num_warps=8, **UNFUSED,
    )  # fmt: skip
