"""Triton kernels of a decoder layer: residual RMS norm, RoPE and SiLU gate, with their gradients.

Each computes in float32 and rounds its result once. Engine and learner run the same kernels, and a
row does not depend on its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyfleet.models.fused.head_layout import HeadLayout

_MAX_PROGRAMS = 1056
"""Programs of a kernel that sums over rows: eight per multiprocessor of an H200."""


@triton.jit
def _add_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, scale_ptr, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(delta_ptr + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if not IS_FIRST:
        x += tl.load(x_ptr + row * WIDTH + at, mask=inside, other=0.0)
    tl.store(sum_ptr + row * WIDTH + at, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(scale_ptr + row, scale)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + at, out, mask=inside)


def add_norm(
    x_TE: Tensor | None, delta_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the float32 sum, its RMS norm in the weights' dtype, and the scale of each row."""
    n, width = delta_TE.shape
    sum_TE = torch.empty(n, width, dtype=torch.float32, device=delta_TE.device)
    out_TE = torch.empty_like(delta_TE, dtype=weight_E.dtype)
    scale_T = torch.empty(n, dtype=torch.float32, device=delta_TE.device)
    _add_norm_kernel[(n,)](
        sum_TE if x_TE is None else x_TE, delta_TE, weight_E, sum_TE, out_TE, scale_T, eps,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), IS_FIRST=x_TE is None,
    )  # fmt: skip
    return sum_TE, out_TE, scale_T


@triton.jit(do_not_specialize=["n_rows", "n_programs"])
def _add_norm_backward_kernel(
    dsum_ptr, dout_ptr, sum_ptr, scale_ptr, weight_ptr, dx_ptr, ddelta_ptr, dweight_ptr,
    n_rows, n_programs, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_DSUM: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, n_rows, n_programs):
        here = row * WIDTH + at
        dout = tl.load(dout_ptr + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        unit = tl.load(sum_ptr + here, mask=inside, other=0.0) * scale
        dweight += dout * unit
        dunit = dout * weight
        dx = (dunit - unit * (tl.sum(dunit * unit, axis=0) / WIDTH)) * scale
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + here, mask=inside, other=0.0)
        tl.store(dx_ptr + here, dx, mask=inside)
        tl.store(ddelta_ptr + here, dx.to(ddelta_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + program * WIDTH + at, dweight, mask=inside)


def add_norm_backward(
    dsum_TE: Tensor | None, dout_TE: Tensor, sum_TE: Tensor, scale_T: Tensor, weight_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x` and `delta`, which differ only in dtype, and of the weight."""
    n, width = dout_TE.shape
    dx_TE, ddelta_TE = torch.empty_like(sum_TE), torch.empty_like(dout_TE)
    programs = min(n, _MAX_PROGRAMS)
    dweight_PE = torch.empty(programs, width, dtype=torch.float32, device=dout_TE.device)
    _add_norm_backward_kernel[(programs,)](
        sum_TE if dsum_TE is None else dsum_TE, dout_TE, sum_TE, scale_T, weight_E,
        dx_TE, ddelta_TE, dweight_PE, n, programs,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), HAS_DSUM=dsum_TE is not None,
    )  # fmt: skip
    return dx_TE, ddelta_TE, dweight_PE.sum(dim=0)


@triton.jit
def rope_heads(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, token, position,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Return all heads of a token, the same with RoPE applied, and masks for q, k and v heads."""
    head = tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, HEAD_DIM)[None, :]
    opposite = (at + HEAD_DIM // 2) % HEAD_DIM
    inside = head < HEADS + 2 * KV_HEADS
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & inside
    base = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    x = tl.load(base + at, mask=inside, other=0.0)
    direct = x.to(tl.float32)
    opposite_x = tl.load(base + opposite, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        q_weight, k_weight = tl.load(q_norm_ptr + at), tl.load(k_norm_ptr + at)
        weight = tl.where(is_q, q_weight, k_weight).to(tl.float32)
        q_weight, k_weight = tl.load(q_norm_ptr + opposite), tl.load(k_norm_ptr + opposite)
        opposite_weight = tl.where(is_q, q_weight, k_weight).to(tl.float32)
        scale = tl.rsqrt(tl.sum(direct * direct, axis=1) / HEAD_DIM + eps)[:, None]
        direct = direct * scale * weight
        opposite_x = opposite_x * scale * opposite_weight
    cos = tl.load(cos_ptr + position * HEAD_DIM + at)
    sin = tl.load(sin_ptr + position * HEAD_DIM + at)
    rotated = (direct * cos + opposite_x * sin).to(x.dtype)
    return x, rotated, is_q, is_k, is_v, head, at


@triton.jit
def _rope_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr, q_norm_ptr, k_norm_ptr, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    x, rotated, is_q, is_k, is_v, head, at = rope_heads(
        qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
        token, tl.load(positions_ptr + token), HEADS, KV_HEADS, HEAD_DIM, ROWS, NORMED,
    )  # fmt: skip
    tl.store(q_ptr + (token * HEADS + head) * HEAD_DIM + at, rotated, mask=is_q)
    tl.store(k_ptr + (token * KV_HEADS + head - HEADS) * HEAD_DIM + at, rotated, mask=is_k)
    tl.store(v_ptr + (token * KV_HEADS + head - HEADS - KV_HEADS) * HEAD_DIM + at, x, mask=is_v)


def apply_rope(
    qkv_TX: Tensor, heads: HeadLayout, cos_PD: Tensor, sin_PD: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the projections, norm queries and keys where the model does, and apply RoPE to them."""
    n = len(qkv_TX)
    q_THD = qkv_TX.new_empty(n, heads.n_heads, heads.head_dim)
    k_TKD = qkv_TX.new_empty(n, heads.n_kv_heads, heads.head_dim)
    v_TKD = torch.empty_like(k_TKD)
    q_norm, k_norm = heads.norms or (cos_PD, cos_PD)
    _rope_kernel[(n,)](
        qkv_TX, q_THD, k_TKD, v_TKD, cos_PD, sin_PD, positions_T, q_norm, k_norm, heads.eps,
        HEADS=heads.n_heads, KV_HEADS=heads.n_kv_heads, HEAD_DIM=heads.head_dim,
        ROWS=triton.next_power_of_2(heads.n_heads + 2 * heads.n_kv_heads),
        NORMED=heads.norms is not None,
    )  # fmt: skip
    return q_THD, k_TKD, v_TKD


@triton.jit(do_not_specialize=["n_tokens", "n_programs"])
def _rope_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, dqkv_ptr, cos_ptr, sin_ptr, positions_ptr,
    q_norm_ptr, k_norm_ptr, dnorms_ptr, n_tokens, n_programs, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, HEAD_DIM)[None, :]
    opposite = (at + HEAD_DIM // 2) % HEAD_DIM
    inside = head < HEADS + 2 * KV_HEADS
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & inside
    q_sum = tl.zeros((HEAD_DIM,), tl.float32)
    k_sum = tl.zeros((HEAD_DIM,), tl.float32)
    for token in range(program, n_tokens, n_programs):
        q_base = dq_ptr + (token * HEADS + head) * HEAD_DIM
        k_base = dk_ptr + (token * KV_HEADS + head - HEADS) * HEAD_DIM
        v_base = dv_ptr + (token * KV_HEADS + head - HEADS - KV_HEADS) * HEAD_DIM
        direct = tl.load(q_base + at, mask=is_q, other=0.0).to(tl.float32)
        direct += tl.load(k_base + at, mask=is_k, other=0.0).to(tl.float32)
        opposite_x = tl.load(q_base + opposite, mask=is_q, other=0.0).to(tl.float32)
        opposite_x += tl.load(k_base + opposite, mask=is_k, other=0.0).to(tl.float32)
        position = tl.load(positions_ptr + token)
        cos = tl.load(cos_ptr + position * HEAD_DIM + at)
        sin = tl.load(sin_ptr + position * HEAD_DIM + opposite)
        dx = direct * cos + opposite_x * sin
        here = (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + at
        if NORMED:
            x = tl.load(qkv_ptr + here, mask=is_q | is_k, other=0.0).to(tl.float32)
            q_weight, k_weight = tl.load(q_norm_ptr + at), tl.load(k_norm_ptr + at)
            weight = tl.where(is_q, q_weight, k_weight).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
            unit = x * scale
            q_sum += tl.sum(tl.where(is_q, dx * unit, 0.0), axis=0)
            k_sum += tl.sum(tl.where(is_k, dx * unit, 0.0), axis=0)
            dunit = dx * weight
            dx = (dunit - unit * (tl.sum(dunit * unit, axis=1) / HEAD_DIM)[:, None]) * scale
        dv = tl.load(v_base + at, mask=is_v, other=0.0).to(tl.float32)
        dqkv = tl.where(is_v, dv, dx).to(dqkv_ptr.dtype.element_ty)
        tl.store(dqkv_ptr + here, dqkv, mask=inside)
    if NORMED:
        lane = tl.arange(0, HEAD_DIM)
        tl.store(dnorms_ptr + program * 2 * HEAD_DIM + lane, q_sum)
        tl.store(dnorms_ptr + (program * 2 + 1) * HEAD_DIM + lane, k_sum)


def rope_backward(
    dq_THD: Tensor, dk_TKD: Tensor, dv_TKD: Tensor, qkv_TX: Tensor, heads: HeadLayout,
    cos_PD: Tensor, sin_PD: Tensor, positions_T: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the projections, and of the two norm weights [2, D] where there are any."""
    n = len(qkv_TX)
    dqkv_TX = torch.empty_like(qkv_TX)
    programs = min(n, _MAX_PROGRAMS)
    dnorms_P2D = torch.empty(programs, 2, heads.head_dim, dtype=torch.float32, device=qkv_TX.device)
    q_norm, k_norm = heads.norms or (cos_PD, cos_PD)
    _rope_backward_kernel[(programs,)](
        dq_THD, dk_TKD, dv_TKD, qkv_TX, dqkv_TX, cos_PD, sin_PD, positions_T, q_norm, k_norm,
        dnorms_P2D, n, programs, heads.eps,
        HEADS=heads.n_heads, KV_HEADS=heads.n_kv_heads, HEAD_DIM=heads.head_dim,
        ROWS=triton.next_power_of_2(heads.n_heads + 2 * heads.n_kv_heads),
        NORMED=heads.norms is not None,
    )  # fmt: skip
    return dqkv_TX, None if heads.norms is None else dnorms_P2D.sum(dim=0)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    out = (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + at, out, mask=inside)


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(first half) * second half."""
    n, width = len(gate_up_TF), gate_up_TF.shape[1] // 2
    out_TF = gate_up_TF.new_empty(n, width)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(n, triton.cdiv(width, block))](gate_up_TF, out_TF, WIDTH=width, BLOCK=block)
    return out_TF


@triton.jit
def _silu_mul_backward_kernel(
    dout_ptr, gate_up_ptr, dgate_up_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    first, second = row * 2 * WIDTH + at, (row * 2 + 1) * WIDTH + at
    dout = tl.load(dout_ptr + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + second, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dout * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dgate_up_ptr + first, dgate.to(dgate_up_ptr.dtype.element_ty), mask=inside)
    dup = dout * gate * sigmoid
    tl.store(dgate_up_ptr + second, dup.to(dgate_up_ptr.dtype.element_ty), mask=inside)


def silu_mul_backward(dout_TF: Tensor, gate_up_TF: Tensor) -> Tensor:
    n, width = dout_TF.shape
    dgate_up_TF = torch.empty_like(gate_up_TF)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_backward_kernel[(n, triton.cdiv(width, block))](
        dout_TF, gate_up_TF, dgate_up_TF, WIDTH=width, BLOCK=block
    )
    return dgate_up_TF
