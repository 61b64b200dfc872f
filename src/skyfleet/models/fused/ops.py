"""Differentiable ops of a decoder layer and its head: Triton on CUDA, plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from skyfleet.models.fused.head_layout import HeadLayout


def kernels(
    device: torch.device, name: str = "kernels", *, package: str = "skyfleet.models.fused"
) -> Any:
    """Return the module `triton_{name}` of `package` on CUDA, its `torch_kernels` elsewhere."""
    return _import_kernels(device.type, f"{package}.triton_{name}", f"{package}.torch_kernels")


@cache
def _import_kernels(device_type: str, triton_module: str, torch_module: str) -> Any:
    # Imported late: Triton comes with CUDA builds of torch only.
    return import_module(triton_module if device_type == "cuda" else torch_module)


def matmul(
    x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """`x @ weight.T + bias`, without a gradient; each row has the same bits in any batch."""
    out_TF: Tensor = kernels(x_TE.device, "matmul").matmul(x_TE, weight_FE, bias_F, dtype=dtype)
    return out_TF


def add_norm(
    x_TE: Tensor | None, delta_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add `delta_TE` to the float32 residual (None at the start).

    Return the sum and its RMS norm.
    """
    both: tuple[Tensor, Tensor] = _AddNorm.apply(x_TE, delta_TE, weight_E, eps)  # type: ignore[no-untyped-call]
    return both


def apply_rope(
    qkv_TX: Tensor, heads: HeadLayout, tables: tuple[Tensor, Tensor], positions_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Split projections into queries, keys and values, and apply RoPE to queries and keys."""
    norms = heads.norms or (None, None)
    all_three: tuple[Tensor, Tensor, Tensor] = _ApplyRope.apply(  # type: ignore[no-untyped-call]
        qkv_TX, *norms, heads, *tables, positions_T
    )
    return all_three


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(first half) * second half."""
    out_TF: Tensor = _SiluMul.apply(gate_up_TF)  # type: ignore[no-untyped-call]
    return out_TF


def fused_linear(
    x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, parts: Sequence[Tensor]
) -> Tensor:
    """Several projections of one input as one matmul, over the storage that their weights share.

    `parts` are the single weights, then the biases. They receive the gradients.
    """
    out_TF: Tensor = _FusedLinear.apply(x_TE, weight_FE, bias_F, *parts)  # type: ignore[no-untyped-call]
    return out_TF


def joined_linear(x_TE: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """As `fused_linear`, of weights that are at several places: both passes join a copy of them.

    Kept for the backward pass, the copies would be all layers that sharding has just freed.
    """
    out_TF: Tensor = _JoinedLinear.apply(x_TE, *parts)  # type: ignore[no-untyped-call]
    return out_TF


def head_logprobs(
    hidden_NE: Tensor,
    head_VE: Tensor,
    chosen_N: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy of the chosen tokens; only one chunk of logits exists at a time."""
    both: tuple[Tensor, Tensor] = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NE, head_VE, chosen_N, temperature, chunk_size, entropy_gradient
    )
    return both


class _AddNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor | None, delta_TE: Tensor, weight_E: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        sum_TE, out_TE, scale_T = kernels(delta_TE.device).add_norm(x_TE, delta_TE, weight_E, eps)
        ctx.save_for_backward(sum_TE, scale_T, weight_E)
        ctx.delta_dtype = delta_TE.dtype
        ctx.set_materialize_grads(False)
        return sum_TE, out_TE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dsum_TE, dout_TE = grads
        sum_TE, scale_T, weight_E = ctx.saved_tensors
        if dout_TE is None:
            raise AssertionError("the output of a norm must take part in the loss")
        dx_TE, ddelta_TE, dweight_E = kernels(sum_TE.device).add_norm_backward(
            dsum_TE, dout_TE.contiguous(), sum_TE, scale_T, weight_E
        )
        ddelta_TE = dx_TE if ctx.delta_dtype == dx_TE.dtype else ddelta_TE
        return dx_TE if ctx.needs_input_grad[0] else None, ddelta_TE, dweight_E, None


class _ApplyRope(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TX: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        heads: HeadLayout,
        cos_PD: Tensor,
        sin_PD: Tensor,
        positions_T: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv_TX, cos_PD, sin_PD, positions_T)
        ctx.heads = heads
        q, k, v = kernels(qkv_TX.device).apply_rope(qkv_TX, heads, cos_PD, sin_PD, positions_T)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_TX, cos_PD, sin_PD, positions_T = ctx.saved_tensors
        dqkv_TX, dnorms_2D = kernels(qkv_TX.device).rope_backward(
            *(grad.contiguous() for grad in grads), qkv_TX, ctx.heads, cos_PD, sin_PD, positions_T
        )
        q_norm, k_norm = (None, None) if dnorms_2D is None else dnorms_2D.unbind()
        return dqkv_TX, q_norm, k_norm, None, None, None, None


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TF)
        out_TF: Tensor = kernels(gate_up_TF.device).silu_mul(gate_up_TF)
        return out_TF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up_TF,) = ctx.saved_tensors
        dgate_up_TF: Tensor = kernels(gate_up_TF.device).silu_mul_backward(
            grads[0].contiguous(), gate_up_TF
        )
        return dgate_up_TF


class _FusedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, *parts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_TE, weight_FE)
        ctx.sizes = [len(part) for part in parts if part.dim() == 2]
        ctx.biased = len(parts) > len(ctx.sizes)
        return matmul(x_TE, weight_FE, bias_F, dtype=x_TE.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, weight_FE = ctx.saved_tensors
        dx_TE = grads[0] @ weight_FE if ctx.needs_input_grad[0] else None
        needed = ctx.needs_input_grad[3:]
        return (dx_TE, None, None, *_part_gradients(ctx, grads[0], x_TE, needed))


class _JoinedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, *parts: Tensor) -> Tensor:
        weights = [part for part in parts if part.dim() == 2]
        biases = parts[len(weights) :]
        ctx.save_for_backward(x_TE, *weights)
        ctx.sizes, ctx.biased = list(map(len, weights)), bool(biases)
        bias_F = torch.cat(biases) if biases else None
        return matmul(x_TE, _join(weights), bias_F, dtype=x_TE.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, *weights = ctx.saved_tensors
        dx_TE = grads[0] @ _join(weights) if ctx.needs_input_grad[0] else None
        return (dx_TE, *_part_gradients(ctx, grads[0], x_TE, ctx.needs_input_grad[1:]))


def _join(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def _part_gradients(
    ctx: Any, dout_TF: Tensor, x_TE: Tensor, needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Of each weight, then of each bias."""
    if not any(needed):
        return [None] * len(needed)
    dparts = torch.split(matmul_float32(dout_TF.T, x_TE), ctx.sizes)
    if not ctx.biased:
        return dparts
    dbias_F = dout_TF.sum(dim=0, dtype=at_least_float32(dout_TF.dtype))
    return [*dparts, *torch.split(dbias_F, ctx.sizes)]


class _HeadLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        head_VE: Tensor,
        chosen_N: Tensor,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        parts: Sequence[tuple[Tensor, Tensor, Tensor]] = [
            kernels(hidden_NE.device, "logprobs").token_logprobs(
                matmul(hidden_CE, head_VE, dtype=at_least_float32(hidden_NE.dtype)),
                chosen_C,
                temperature,
            )
            for hidden_CE, chosen_C in zip(
                torch.split(hidden_NE, chunk_size), torch.split(chosen_N, chunk_size), strict=True
            )
        ]
        logprobs_N, entropy_N, lse_N = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_NE, head_VE, chosen_N, lse_N, entropy_N)
        ctx.temperature, ctx.chunk_size, ctx.with_entropy = temperature, chunk_size, with_entropy
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NE, head_VE, chosen_N, lse_N, entropy_N = ctx.saved_tensors
        dlogprobs_N, dentropy_N = grads
        if dlogprobs_N is None:
            dlogprobs_N = torch.zeros_like(lse_N)
        dhidden_NE = torch.empty_like(hidden_NE)
        dhead_VE = None
        for start in range(0, len(hidden_NE), ctx.chunk_size):
            here = slice(start, start + ctx.chunk_size)
            dlogits_CV = kernels(hidden_NE.device, "logprobs").head_logprobs_backward(
                hidden_NE[here],
                head_VE,
                chosen_N[here],
                lse_N[here],
                entropy_N[here],
                dlogprobs_N[here].contiguous(),
                dentropy_N[here].contiguous()
                if ctx.with_entropy and dentropy_N is not None
                else None,
                ctx.temperature,
            )
            torch.mm(dlogits_CV, head_VE, out=dhidden_NE[here])
            if ctx.needs_input_grad[1]:
                part_VE = matmul_float32(dlogits_CV.T, hidden_NE[here])
                dhead_VE = part_VE if dhead_VE is None else dhead_VE.add_(part_VE)
        return dhidden_NE, dhead_VE, None, None, None, None


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product in float32, before any rounding to a coarser dtype."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
