"""Gradients of LoRA adapters that are already merged into the weights they adapt.

The forward pass uses the merged weights and adds nothing. The backward pass computes the gradients
of A and B directly, without a gradient of the size of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from skyfleet.models.fused.ops import matmul_float32


def attach_lora_gradients(out_TF: Tensor, x_TE: Tensor, layers: Sequence[Any]) -> Tensor:
    """Return `out_TF`, the concatenated outputs of `layers`, with gradients to their adapters."""
    if not torch.is_grad_enabled():
        return out_TF
    parts: list[tuple[slice, float]] = []
    pairs: list[Tensor] = []
    stop = 0
    for layer in layers:
        start, stop = stop, stop + layer.out_features
        if hasattr(layer, "lora_A"):
            parts.append((slice(start, stop), layer.scale))
            pairs += [layer.lora_A, layer.lora_B]
    if not parts:
        return out_TF
    out: Tensor = _LoraGradients.apply(out_TF, x_TE, parts, *pairs)  # type: ignore[no-untyped-call]
    return out


class _LoraGradients(Function):
    @staticmethod
    def forward(
        ctx: Any,
        out_TF: Tensor,
        x_TE: Tensor,
        parts: Sequence[tuple[slice, float]],
        *pairs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_TE, *pairs)
        ctx.parts = parts
        return out_TF.view_as(out_TF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *pairs = ctx.saved_tensors
        x_TE, dout_TF = x.flatten(0, -2), grads[0].flatten(0, -2)
        dpairs: list[Tensor] = []
        for (part, scale), a_RE, b_OR in zip(ctx.parts, pairs[::2], pairs[1::2], strict=True):
            dout_TO = dout_TF[:, part]
            outer_TR = dout_TO @ b_OR.to(dout_TO.dtype)
            inner_TR = x_TE @ a_RE.to(x_TE.dtype).T
            dpairs += [
                matmul_float32(outer_TR.T, x_TE) * scale,
                matmul_float32(dout_TO.T, inner_TR) * scale,
            ]
        return grads[0], None, None, *dpairs
