"""FusedLayer: one layer of the Llama family over kernels, on the very weights the learner trains.

Projections of one input become one matrix: the module's own parameters become views of it, so a
weight update is seen here without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyfleet.models.fused.functions import add_norm, gate, joined_linear, turn
from skyfleet.models.fused.low_rank import reach_adapters
from skyfleet.models.fused.shapes import Heads

PIECE = 65_536
"""Rows of a pass: of a longer one a layer's wide middle is held a piece at a time."""


class Joined:
    """Several linear layers of one input."""

    def __init__(self, *layers: nn.Linear) -> None:
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.weight = _joined(weights)
        self.bias = _joined(biases) if biases else None
        self._parts = (*weights, *biases)
        self._layers = layers

    def __call__(self, x_TE: Tensor) -> Tensor:
        out_TF = joined_linear(x_TE, self.weight, self.bias, self._parts)
        return reach_adapters(out_TF, x_TE, self._layers)


class FusedLayer:
    def __init__(self, layer: Any, *, n_heads: int, n_kv_heads: int, width: int, eps: float):
        block, mlp = layer.self_attn, layer.mlp
        self.qkv = Joined(block.q_proj, block.k_proj, block.v_proj)
        self.out = Joined(block.o_proj)
        self.gate_up = Joined(mlp.gate_proj, mlp.up_proj)
        self.down = Joined(mlp.down_proj)
        self.input_norm: Tensor = layer.input_layernorm.weight
        self.post_norm: Tensor = layer.post_attention_layernorm.weight
        self.heads = Heads(
            queries=n_heads,
            keys=n_kv_heads,
            width=width,
            norms=(block.q_norm.weight, block.k_norm.weight) if hasattr(block, "q_norm") else None,
            eps=eps,
        )

    @property
    def n_weights(self) -> int:
        """Those of its products: each is a multiplication and an addition for every token."""
        return sum(j.weight.numel() for j in (self.qkv, self.out, self.gate_up, self.down))

    def __call__(
        self,
        index: int,
        x_TE: Tensor | None,
        delta_TE: Tensor,
        tables: tuple[Tensor, Tensor],
        positions_T: Tensor,
        attend: Any,
        *,
        sparing: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The float32 residual and what is still to be added to it, as the layer before left them.

        `sparing` computes the middle of long passes up to once more for its gradient. A layer is
        computed here as in `engines/cuda/forward.py`, where the engine runs it: mend both.
        """
        eps = self.heads.eps
        x_TE, y_TE = add_norm(x_TE, delta_TE, self.input_norm, eps)
        q_THD, k_TKD, v_TKD = turn(self.qkv(y_TE), self.heads, tables, positions_T)
        out_THD = attend(index, q_THD, k_TKD, v_TKD)
        x_TE, y_TE = add_norm(x_TE, self.out(out_THD.flatten(1)), self.post_norm, eps)
        if len(y_TE) <= PIECE or (torch.is_grad_enabled() and not sparing):
            return x_TE, self._middle(y_TE)
        pieces = [checkpoint(self._middle, y, use_reentrant=False) for y in y_TE.split(PIECE)]
        return x_TE, torch.cat(pieces)

    def _middle(self, y_TE: Tensor) -> Tensor:
        return self.down(gate(self.gate_up(y_TE)))


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    if len(parameters) == 1:
        return parameters[0]
    # Joined before: whoever did it must go on seeing the updates.
    if (same := _side_by_side(parameters)) is not None:
        return same
    joined = torch.cat([p.detach() for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined


def _side_by_side(parameters: Sequence[Tensor]) -> Tensor | None:
    """One tensor over all of them, if they follow each other in one storage."""
    first, n_rows = parameters[0], sum(map(len, parameters))
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for parameter in parameters:
        if (parameter.untyped_storage().data_ptr(), parameter.data_ptr()) != (storage, place):
            return None
        place += parameter.nbytes
    return first.detach().as_strided((n_rows, *first.shape[1:]), first.stride())
