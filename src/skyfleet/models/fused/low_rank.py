"""Low rank: the gradient of adapters that are already merged into the weights they adapt.

A product with merged weights needs nothing added to it; only its gradient has to reach A and B,
and a gradient as large as the weights never exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from skyfleet.models.fused.functions import product_in_float32


def reach_adapters(out_TF: Tensor, x_TE: Tensor, layers: Sequence[Any]) -> Tensor:
    """`out_TF`, the outputs of `layers` side by side, made to pass gradients to their adapters."""
    if not torch.is_grad_enabled():
        return out_TF
    places: list[tuple[slice, float]] = []
    pairs: list[Tensor] = []
    stop = 0
    for layer in layers:
        start, stop = stop, stop + layer.out_features
        if hasattr(layer, "lora_A"):
            places.append((slice(start, stop), layer.scale))
            pairs += [layer.lora_A, layer.lora_B]
    if not places:
        return out_TF
    out: Tensor = _Reach.apply(out_TF, x_TE, places, *pairs)  # type: ignore[no-untyped-call]
    return out


class _Reach(Function):
    @staticmethod
    def forward(
        ctx: Any,
        out_TF: Tensor,
        x_TE: Tensor,
        places: Sequence[tuple[slice, float]],
        *pairs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_TE, *pairs)
        ctx.places = places
        return out_TF.view_as(out_TF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *pairs = ctx.saved_tensors
        x_TE, dout_TF = x.flatten(0, -2), grads[0].flatten(0, -2)
        dpairs: list[Tensor] = []
        for (place, scale), a_RE, b_OR in zip(ctx.places, pairs[::2], pairs[1::2], strict=True):
            dout_TO = dout_TF[:, place]
            outer_TR = dout_TO @ b_OR.to(dout_TO.dtype)
            inner_TR = x_TE @ a_RE.to(x_TE.dtype).T
            dpairs += [
                product_in_float32(outer_TR.T, x_TE) * scale,
                product_in_float32(dout_TO.T, inner_TR) * scale,
            ]
        return grads[0], None, None, *dpairs
