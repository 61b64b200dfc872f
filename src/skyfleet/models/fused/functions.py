"""The layers' steps with their gradients, over kernels that the device chooses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from skyfleet.models.fused.shapes import Heads


def kernels(
    device: torch.device, name: str = "kernels", *, package: str = "skyfleet.models.fused"
) -> Any:
    return _kernels(device.type, f"{package}.triton_{name}", f"{package}.torch_kernels")


@cache
def _kernels(device_type: str, of_cuda: str, of_others: str) -> Any:
    """Triton comes with torch for CUDA only."""
    return import_module(of_cuda if device_type == "cuda" else of_others)


def product(
    x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """`x @ weight.T + bias`, without a gradient; each row the same bits in any batch."""
    out_TF: Tensor = kernels(x_TE.device, "products").product(x_TE, weight_FE, bias_F, dtype=dtype)
    return out_TF


def add_norm(
    x_TE: Tensor | None, delta_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(float32 residual or None, what is added to it) -> (new residual, its norm)."""
    both: tuple[Tensor, Tensor] = _AddNorm.apply(x_TE, delta_TE, weight_E, eps)  # type: ignore[no-untyped-call]
    return both


def turn(
    qkv_TX: Tensor, heads: Heads, tables: tuple[Tensor, Tensor], positions_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Projections -> queries and keys at their positions, and values."""
    norms = heads.norms or (None, None)
    all_three: tuple[Tensor, Tensor, Tensor] = _Turn.apply(  # type: ignore[no-untyped-call]
        qkv_TX, *norms, heads, *tables, positions_T
    )
    return all_three


def gate(gate_up_TF: Tensor) -> Tensor:
    """silu(first half) * second half."""
    out_TF: Tensor = _Gate.apply(gate_up_TF)  # type: ignore[no-untyped-call]
    return out_TF


def joined_linear(
    x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, parts: Sequence[Tensor]
) -> Tensor:
    """Projections of one input as one product, over storage that their weights share.

    `parts` are the weights one by one, then the biases: they get the gradients.
    """
    out_TF: Tensor = _JoinedLinear.apply(x_TE, weight_FE, bias_F, *parts)  # type: ignore[no-untyped-call]
    return out_TF


def scores(
    hidden_NE: Tensor,
    head_VE: Tensor,
    chosen_N: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy of the chosen tokens; logits live one chunk at a time."""
    both: tuple[Tensor, Tensor] = _Scores.apply(  # type: ignore[no-untyped-call]
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
            raise AssertionError("a norm that nobody reads has no gradient")
        dx_TE, ddelta_TE, dweight_E = kernels(sum_TE.device).add_norm_back(
            dsum_TE, dout_TE.contiguous(), sum_TE, scale_T, weight_E
        )
        of_delta_TE = dx_TE if ctx.delta_dtype == dx_TE.dtype else ddelta_TE
        return dx_TE if ctx.needs_input_grad[0] else None, of_delta_TE, dweight_E, None


class _Turn(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TX: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        heads: Heads,
        cos_PD: Tensor,
        sin_PD: Tensor,
        positions_T: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv_TX, cos_PD, sin_PD, positions_T)
        ctx.heads = heads
        q, k, v = kernels(qkv_TX.device).turn(qkv_TX, heads, cos_PD, sin_PD, positions_T)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_TX, cos_PD, sin_PD, positions_T = ctx.saved_tensors
        dqkv_TX, dnorms_2D = kernels(qkv_TX.device).turn_back(
            *(grad.contiguous() for grad in grads), qkv_TX, ctx.heads, cos_PD, sin_PD, positions_T
        )
        q_norm, k_norm = (None, None) if dnorms_2D is None else dnorms_2D.unbind()
        return dqkv_TX, q_norm, k_norm, None, None, None, None


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TF)
        out_TF: Tensor = kernels(gate_up_TF.device).gate(gate_up_TF)
        return out_TF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up_TF,) = ctx.saved_tensors
        dgate_up_TF: Tensor = kernels(gate_up_TF.device).gate_back(
            grads[0].contiguous(), gate_up_TF
        )
        return dgate_up_TF


class _JoinedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, *parts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_TE, weight_FE)
        ctx.sizes = [len(part) for part in parts if part.dim() == 2]
        ctx.biased = len(parts) > len(ctx.sizes)
        return product(x_TE, weight_FE, bias_F, dtype=x_TE.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, weight_FE = ctx.saved_tensors
        dout_TF = grads[0]
        dx_TE = dout_TF @ weight_FE if ctx.needs_input_grad[0] else None
        dparts: Sequence[Tensor | None] = [None] * len(ctx.needs_input_grad[3:])
        if any(ctx.needs_input_grad[3:]):
            dparts = torch.split(product_in_float32(dout_TF.T, x_TE), ctx.sizes)
            if ctx.biased:
                dparts = [
                    *dparts,
                    *torch.split(dout_TF.sum(dim=0, dtype=wide(dout_TF.dtype)), ctx.sizes),
                ]
        return (dx_TE, None, None, *dparts)


class _Scores(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        head_VE: Tensor,
        chosen_N: Tensor,
        temperature: float,
        chunk_size: int,
        entropic: bool,
    ) -> tuple[Tensor, Tensor]:
        parts: Sequence[tuple[Tensor, Tensor, Tensor]] = [
            kernels(hidden_NE.device, "scores").score(
                product(hidden_CE, head_VE, dtype=wide(hidden_NE.dtype)), chosen_C, temperature
            )
            for hidden_CE, chosen_C in zip(
                torch.split(hidden_NE, chunk_size), torch.split(chosen_N, chunk_size), strict=True
            )
        ]
        logprobs_N, entropy_N, total_N = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_NE, head_VE, chosen_N, total_N, entropy_N)
        ctx.temperature, ctx.chunk_size, ctx.entropic = temperature, chunk_size, entropic
        ctx.set_materialize_grads(False)
        if not entropic:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NE, head_VE, chosen_N, total_N, entropy_N = ctx.saved_tensors
        dlogprobs_N, dentropy_N = grads
        if dlogprobs_N is None:
            dlogprobs_N = torch.zeros_like(total_N)
        dhidden_NE = torch.empty_like(hidden_NE)
        dhead_VE = None
        for start in range(0, len(hidden_NE), ctx.chunk_size):
            here = slice(start, start + ctx.chunk_size)
            dlogits_CV = kernels(hidden_NE.device, "head").scores_back(
                hidden_NE[here],
                head_VE,
                chosen_N[here],
                total_N[here],
                entropy_N[here],
                dlogprobs_N[here].contiguous(),
                dentropy_N[here].contiguous() if ctx.entropic and dentropy_N is not None else None,
                ctx.temperature,
            )
            torch.mm(dlogits_CV, head_VE, out=dhidden_NE[here])
            if ctx.needs_input_grad[1]:
                part_VE = product_in_float32(dlogits_CV.T, hidden_NE[here])
                dhead_VE = part_VE if dhead_VE is None else dhead_VE.add_(part_VE)
        return dhidden_NE, dhead_VE, None, None, None, None


def product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product as it was summed, before any rounding to a coarser type."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)
