"""FusedLayer: a layer's projections as two matrices, over the very weights the learner trains.

The module's own parameters become views of the fused storage, so a weight update is seen here
without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class FusedLayer:
    def __init__(self, layer: Any) -> None:
        block, mlp = layer.self_attn, layer.mlp
        self.qkv = _fused_linear(block.q_proj, block.k_proj, block.v_proj)
        self.out: tuple[Tensor, Tensor | None] = (block.o_proj.weight, block.o_proj.bias)
        self.gate_up = _fused_linear(mlp.gate_proj, mlp.up_proj)
        self.down: tuple[Tensor, Tensor | None] = (mlp.down_proj.weight, mlp.down_proj.bias)
        self.input_norm: Tensor = layer.input_layernorm.weight
        self.post_norm: Tensor = layer.post_attention_layernorm.weight
        self.qk_norms: tuple[Tensor, Tensor] | None = (
            (block.q_norm.weight, block.k_norm.weight) if hasattr(block, "q_norm") else None
        )


def _fused_linear(*projections: nn.Linear) -> tuple[Tensor, Tensor | None]:
    biases = [p.bias for p in projections if p.bias is not None]
    return _fused([p.weight for p in projections]), _fused(biases) if biases else None


def _fused(parameters: Sequence[Tensor]) -> Tensor:
    fused = torch.cat([p.detach() for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + len(parameter)]
        start += len(parameter)
    return fused
