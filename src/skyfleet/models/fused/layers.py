"""FusedLayer: one layer of the Llama family on fused kernels, over the learner's weights.

Projections of the same input become one matrix. The module's own parameters become views of it, so
a weight update needs no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyfleet.models.fused.head_layout import HeadLayout
from skyfleet.models.fused.lora_gradients import attach_lora_gradients
from skyfleet.models.fused.ops import (
    add_norm,
    apply_rope,
    fused_linear,
    joined_linear,
    silu_mul,
)

MLP_CHUNK = 65_536
"""Rows per chunk of the MLP in a long pass, to hold its wide activations one chunk at a time."""


class FusedLinear:
    """Several linear layers of the same input, computed as one."""

    def __init__(self, *layers: nn.Linear, shares_storage: bool = True) -> None:
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._parts = (*weights, *biases)
        self._layers = layers
        self._is_copied = not shares_storage
        if self._is_copied:
            return
        self.weight = _fuse_parameters(weights)
        self.bias = _fuse_parameters(biases) if biases else None

    def __call__(self, x_TE: Tensor) -> Tensor:
        if self._is_copied:
            out_TF = joined_linear(x_TE, self._parts)
        else:
            out_TF = fused_linear(x_TE, self.weight, self.bias, self._parts)
        return attach_lora_gradients(out_TF, x_TE, self._layers)


class DividedHeads(Protocol):
    """Where heads and MLP are divided among ranks (`TensorParallel`)."""

    def spread(self, x_TE: Tensor) -> Tensor: ...

    def join(self, x_TE: Tensor) -> Tensor: ...


class FusedLayer:
    def __init__(
        self,
        layer: Any,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        eps: float,
        shares_storage: bool = True,
        tensor: DividedHeads | None = None,
    ) -> None:
        """Without `shares_storage` the matrices are joined in every pass, and never kept.

        A sharded layer needs that: its weights are gathered for a pass, each at a place of its own.
        """
        block, mlp = layer.self_attn, layer.mlp
        join = partial(FusedLinear, shares_storage=shares_storage)
        self.qkv = join(block.q_proj, block.k_proj, block.v_proj)
        self.out = join(block.o_proj)
        self.gate_up = join(mlp.gate_proj, mlp.up_proj)
        self.down = join(mlp.down_proj)
        self._tensor = tensor
        self.input_norm: Tensor = layer.input_layernorm.weight
        self.post_norm: Tensor = layer.post_attention_layernorm.weight
        self.heads = HeadLayout(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            norms=(block.q_norm.weight, block.k_norm.weight) if hasattr(block, "q_norm") else None,
            eps=eps,
        )

    @property
    def n_weights(self) -> int:
        """Weights of the projections; each costs one multiplication and one addition per token."""
        linears = (self.qkv, self.out, self.gate_up, self.down)
        return sum(linear.weight.numel() for linear in linears)

    def __call__(
        self,
        index: int,
        x_TE: Tensor | None,
        delta_TE: Tensor,
        tables: tuple[Tensor, Tensor],
        positions_T: Tensor,
        attend: Any,
        *,
        save_memory: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Take and return the float32 residual, and the output that is not yet added to it.

        `save_memory` recomputes the MLP of long passes in the backward pass. The CUDA engine
        computes a layer in `run_layers` (engines/cuda/cuda_graphs.py). Both must stay identical.
        """
        eps = self.heads.eps
        x_TE, y_TE = add_norm(x_TE, delta_TE, self.input_norm, eps)
        qkv_TX = self.qkv(self._spread(y_TE))
        q_THD, k_TKD, v_TKD = apply_rope(qkv_TX, self.heads, tables, positions_T)
        out_THD = attend(index, q_THD, k_TKD, v_TKD)
        out_TE = self._join(self.out(out_THD.flatten(1)))
        x_TE, y_TE = add_norm(x_TE, out_TE, self.post_norm, eps)
        if len(y_TE) <= MLP_CHUNK or (torch.is_grad_enabled() and not save_memory):
            return x_TE, self._mlp(y_TE)
        chunks = [checkpoint(self._mlp, y, use_reentrant=False) for y in y_TE.split(MLP_CHUNK)]
        return x_TE, torch.cat(chunks)

    def _mlp(self, y_TE: Tensor) -> Tensor:
        return self._join(self.down(silu_mul(self.gate_up(self._spread(y_TE)))))

    def _spread(self, x_TE: Tensor) -> Tensor:
        return x_TE if self._tensor is None else self._tensor.spread(x_TE)

    def _join(self, x_TE: Tensor) -> Tensor:
        return x_TE if self._tensor is None else self._tensor.join(x_TE)


def _fuse_parameters(parameters: Sequence[Tensor]) -> Tensor:
    if len(parameters) == 1:
        return parameters[0]
    # Fused before: keep that storage, so that its other users still see the updates.
    if (shared := _find_shared_storage(parameters)) is not None:
        return shared
    fused = torch.cat([p.detach() for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + len(parameter)]
        start += len(parameter)
    return fused


def _find_shared_storage(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor over all parameters if they are contiguous in one storage."""
    first, n_rows = parameters[0], sum(map(len, parameters))
    storage, address = first.untyped_storage().data_ptr(), first.data_ptr()
    for parameter in parameters:
        if (parameter.untyped_storage().data_ptr(), parameter.data_ptr()) != (storage, address):
            return None
        address += parameter.nbytes
    return first.detach().as_strided((n_rows, *first.shape[1:]), first.stride())
