"""Triton kernels of one decoding step.

Each rounds to the weights' type exactly where the learner's forward does, so that the two differ
only in the order of their sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(x_ptr + row * WIDTH + at, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + row * WIDTH + at, mask=inside, other=0.0)
    x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
    tl.store(x_ptr + row * WIDTH + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, (wide * scale * weight).to(x.dtype), mask=inside)


def add_norm(x_NE: Tensor, delta_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Adds `delta` to `x` in place and gives back the sum's RMS norm."""
    n, width = x_NE.shape
    out_NE = torch.empty_like(x_NE)
    _add_norm_kernel[(n,)](
        x_NE, delta_NE, weight_E, out_NE, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width)
    )
    return out_NE


@triton.jit
def _gate_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + at, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = (gated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + at, product, mask=inside)


def gate(gate_up_NF: Tensor) -> Tensor:
    """silu(first half) * second half."""
    n, twice = gate_up_NF.shape
    out_NF = gate_up_NF.new_empty(n, twice // 2)
    block = 1024
    _gate_kernel[(n, triton.cdiv(twice // 2, block))](
        gate_up_NF, out_NF, WIDTH=twice // 2, BLOCK=block
    )
    return out_NF


@triton.jit
def _place_kernel(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    lengths_ptr, active_ptr, table_ptr, table_width, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    half: tl.constexpr = WIDTH // 2
    base = qkv_ptr + (row * (HEADS + 2 * KV_HEADS) + head) * WIDTH
    x = tl.load(base + at)
    dtype = x.dtype
    position = tl.load(lengths_ptr + row)
    active = tl.load(active_ptr + row)
    page = tl.load(table_ptr + row * table_width + position // PAGE, mask=active != 0, other=0)
    slot = page.to(tl.int64) * PAGE + tl.where(active != 0, position % PAGE, 0)
    if head < HEADS + KV_HEADS:
        other = tl.load(base + (at + half) % WIDTH)
        if NORMED:
            norm_ptr = q_norm_ptr
            if head >= HEADS:
                norm_ptr = k_norm_ptr
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
            weight = tl.load(norm_ptr + at).to(tl.float32)
            turned = tl.load(norm_ptr + (at + half) % WIDTH).to(tl.float32)
            x = (wide * scale * weight).to(dtype)
            other = (other.to(tl.float32) * scale * turned).to(dtype)
        cos = tl.load(cos_ptr + position * WIDTH + at).to(tl.float32)
        sin = tl.load(sin_ptr + position * WIDTH + at).to(tl.float32)
        straight = (x.to(tl.float32) * cos).to(dtype)
        crossed = (other.to(tl.float32) * sin).to(dtype)
        x = (straight.to(tl.float32) + crossed.to(tl.float32)).to(dtype)
    if head < HEADS:
        tl.store(q_ptr + (row * HEADS + head) * WIDTH + at, x)
    elif head < HEADS + KV_HEADS:
        tl.store(keys_ptr + (slot * KV_HEADS + head - HEADS) * WIDTH + at, x)
    else:
        tl.store(values_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * WIDTH + at, x)


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
    _place_kernel[(n, n_heads + 2 * n_kv)](
        qkv_NX, q_NHD, keys, values, cos_PD, sin_PD, q_norm, k_norm,
        lengths_N, active_N, table_NM, table_NM.shape[1], eps,
        HEADS=n_heads, KV_HEADS=n_kv, WIDTH=width, PAGE=page, NORMED=norms is not None,
        num_warps=1,
    )  # fmt: skip
    return q_NHD


@triton.jit
def _attend_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, lengths_ptr, active_ptr, table_ptr, table_width, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0), tl.program_id(1)
    active = tl.load(active_ptr + row)
    length = tl.where(active != 0, tl.load(lengths_ptr + row) + 1, 0)
    group = tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    here = group < GROUP
    q_at = (row * HEADS + kv_head * GROUP + group[:, None]) * WIDTH + at[None, :]
    q = tl.load(q_ptr + q_at, mask=here[:, None], other=0.0)
    most = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, length, STEP):
        token = start + tl.arange(0, STEP)
        seen = token < length
        page = tl.load(table_ptr + row * table_width + token // PAGE, mask=seen, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        cell = (slot * KV_HEADS + kv_head) * WIDTH
        k = tl.load(keys_ptr + cell[:, None] + at[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, -1e30)
        highest = tl.maximum(most, tl.max(scores, axis=1))
        fade = tl.exp(most - highest)
        weights = tl.exp(scores - highest[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(values_ptr + cell[:, None] + at[None, :], mask=seen[:, None], other=0.0)
        out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        most = highest
    out = out / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_ptr + q_at, out.to(q.dtype), mask=here[:, None])


def attend(
    q_NHD: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths_N: Tensor,
    active_N: Tensor,
    table_NM: Tensor,
) -> Tensor:
    """What each query takes from its own pages, the token just placed included [N, H, D]."""
    n, n_heads, width = q_NHD.shape
    page, n_kv, _ = keys.shape[1:]
    out_NHD = torch.empty_like(q_NHD)
    group = n_heads // n_kv
    _attend_kernel[(n, n_kv)](
        q_NHD, keys, values, out_NHD, lengths_N, active_N, table_NM, table_NM.shape[1], width**-0.5,
        HEADS=n_heads, KV_HEADS=n_kv, WIDTH=width, PAGE=page, GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)), STEP=64,
        PRECISION="ieee" if q_NHD.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_NHD


@triton.jit
def _speak_kernel(
    logits_ptr, slots_ptr, vocabulary, temperatures_ptr, uniforms_ptr, uniforms_width, stops_ptr,
    tokens_ptr, lengths_ptr, active_ptr, said_ptr, most_ptr, step_ptr, out_tokens_ptr,
    out_logprobs_ptr, rows, STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    at = tl.arange(0, BLOCK)
    base = logits_ptr + row.to(tl.int64) * vocabulary
    temperature = tl.load(temperatures_ptr + slot)
    greedy = temperature == 0.0
    factor = 1.0 / tl.where(greedy, 1.0, temperature)
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(base + start + at, mask=start + at < vocabulary, other=-float("inf"))
        x = x.to(tl.float32) * factor
        higher = tl.maximum(highest, x)
        # A lane that has seen nothing yet has no sum to fade.
        total = tl.where(
            higher == -float("inf"), 0.0, total * tl.exp(highest - higher) + tl.exp(x - higher)
        )
        highest = higher
    top = tl.max(highest, axis=0)
    total_all = tl.sum(
        tl.where(highest == -float("inf"), 0.0, total * tl.exp(highest - top)), axis=0
    )
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
    chosen = tl.load(base + token).to(tl.float32) * factor
    logprob = tl.where(greedy, 0.0, chosen - top - tl.log(total_all))
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
    logits_MV: Tensor, slots_M: Tensor, *, temperatures_S: Tensor, uniforms_SW: Tensor,
    stops_SZ: Tensor, tokens_S: Tensor, lengths_S: Tensor, active_S: Tensor, said_S: Tensor,
    most_S: Tensor, step_1: Tensor, out_tokens_KS: Tensor, out_logprobs_KS: Tensor,
) -> None:  # fmt: skip
    """Draws the next token of every slot named, notes it, and lets those rest that have finished.

    One uniform number decides one token: the first whose cumulative share passes it.
    """
    m, vocabulary = logits_MV.shape
    _speak_kernel[(m,)](
        logits_MV, slots_M, vocabulary, temperatures_S, uniforms_SW, uniforms_SW.shape[1], stops_SZ,
        tokens_S, lengths_S, active_S, said_S, most_S, step_1, out_tokens_KS, out_logprobs_KS,
        out_tokens_KS.shape[1], STOPS=stops_SZ.shape[1], BLOCK=4096, num_warps=8,
    )  # fmt: skip
