"""Shard a decoder over ranks with FSDP2: weights are gathered layer by layer, gradients summed.

The decoder reads weights without calling their modules, so FSDP's hooks would not run. Each layer
therefore runs inside a module of its own, and every pass inside a root module that gathers the
embedding, the last norm and the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from skyfleet.errors import ModelError
from skyfleet.models import sequence_parallel, tensor_parallel
from skyfleet.models.decoder import Decoder
from skyfleet.models.fused.flash_attention import HEAD_DIMS
from skyfleet.models.fused.layers import FusedLayer
from skyfleet.models.hf_decoder import HFDecoder
from skyfleet.models.lora import adapters
from skyfleet.models.sequence_parallel import SequenceParallel
from skyfleet.models.tensor_parallel import Split, TensorParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    mesh: DeviceMesh
    """One dimension to shard over, or two: replicas and shards."""
    tensor: TensorParallel | None = None
    sequence: SequenceParallel | None = None
    cpu_offload: bool = False
    """Keep the shards on the CPU; a layer is copied to the device when it runs."""
    reshard_after_forward: bool = True
    """Free a layer after its forward pass and gather it again for the backward pass."""


@dataclass(slots=True)
class Shards:
    """What the ranks hold of a sharded decoder."""

    root: FSDPModule
    splits: dict[str, Split] = field(default_factory=dict)
    """By parameter name: how tensor parallelism divides it."""


def shard_decoder(decoder: Decoder, plan: ShardingPlan, *, trains: bool = True) -> Shards:
    """Replace the decoder's weights by this rank's shards, in place.

    Weights that are trained in a lower precision than float32 become float32 shards: they are the
    optimizer's masters, and each pass gathers them in the lower precision. Gradients are reduced in
    float32. The plan's mesh decides the device.
    """
    module, splits = decoder.module, {}
    if plan.tensor is not None:
        splits = _divide_heads(decoder, plan.tensor)
    if plan.sequence is not None:
        sequence_parallel.check_heads(decoder.n_heads, decoder.n_kv_heads, plan.sequence.size)
        decoder.sequence = plan.sequence
    for layer in adapters(module).values():
        # A buffer would be moved whole to every rank's GPU; it is the weight until an adapter moves.
        layer.base = layer.base.new_empty(0)
    placement = torch.device(plan.mesh.device_type), decoder.dtype
    options = _fsdp_options(decoder, plan, trains=trains)
    root = _wrap_layers(decoder, options)
    # The head is needed again when the backward pass begins.
    fully_shard(root, **options | {"reshard_after_forward": False})
    assert isinstance(root, FSDPModule)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            # The weights of tokens in the loss are those of the whole mini-batch.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.register_forward_pre_hook(_accumulate_in_float32)
    for layer in adapters(module).values():
        # No adapter has moved yet, so the weight is the base.
        assert isinstance(layer.weight, DTensor)
        layer.base = layer.weight.detach().clone()
    _move_tables(decoder, plan.mesh.device_type)
    decoder.placement, decoder.sharded = placement, _Pass(root)
    return Shards(root=root, splits=splits)


def gather(weight: Tensor, split: Split, plan: ShardingPlan) -> Tensor:
    """The whole tensor of a shard, on every rank's device."""
    whole = weight
    if isinstance(weight, DTensor):
        device_type = plan.mesh.device_type
        # Shards that are kept on the CPU are gathered by the devices.
        is_offloaded = weight.to_local().device.type != device_type
        whole = (weight.to(device_type) if is_offloaded else weight).full_tensor()  # type: ignore[attr-defined]
    return whole if plan.tensor is None else plan.tensor.gather(whole, split)


class _Root(nn.Module):
    def forward(self, run: Callable[[], Any]) -> Any:
        # An operation in place on a view would drop FSDP's hook of the backward pass.
        return tree_map_only(Tensor, Tensor.clone, run())


class _Layer(nn.Module):
    """A layer of the Llama family as a module that FSDP gathers."""

    def __init__(self, decoder: Decoder, index: int) -> None:
        super().__init__()
        self.layer = decoder.layers[index]
        self._decoder = [decoder]  # in a list, so that it is no part of the module

    def forward(self, *arguments: Any) -> Any:
        return self._decoder[0].run_layer(*arguments)


class _FusedLayer(_Layer):
    def forward(self, *arguments: Any, recompute: bool = False) -> tuple[Tensor, Tensor]:
        decoder = self._decoder[0]
        # Made anew, because the tensors of the weights exist only inside a pass.
        layer = FusedLayer(
            self.layer,
            n_heads=decoder.n_heads,
            n_kv_heads=decoder.n_kv_heads,
            head_dim=decoder.head_dim,
            eps=decoder.eps,
            shares_storage=False,
            tensor=decoder.tensor,
        )
        x_TE, delta_TE = decoder.compute_fused(layer, *arguments, recompute=recompute)
        return x_TE, delta_TE.clone() if delta_TE._is_view() else delta_TE  # as in `_Root`


class _Pass:
    """Runs a pass inside the root module."""

    def __init__(self, root: _Root) -> None:
        self._root = root

    def __call__(self, run: Callable[[], Any]) -> Any:
        result = self._root(run)
        if not torch.is_grad_enabled():
            # No backward pass will free the weights of the root, and they may change before the next.
            assert isinstance(self._root, FSDPModule)
            self._root.reshard()
        return result


def _divide_heads(decoder: Decoder, tensor: TensorParallel) -> dict[str, Split]:
    if isinstance(decoder, HFDecoder):
        raise ModelError(
            f"trainer.policy.tensor_parallel_size={tensor.size} divides the layers of our own decoder, "
            f"and {type(decoder.module).__name__} runs with that of transformers; set it to 1"
        )
    tensor_parallel.check_heads(decoder.module.config, tensor.size)
    decoder.tensor = tensor
    decoder.n_heads //= tensor.size
    decoder.n_kv_heads //= tensor.size
    return tensor.divide(decoder.module)


def _fsdp_options(decoder: Decoder, plan: ShardingPlan, *, trains: bool) -> dict[str, Any]:
    # Adapters are float32 already, and a frozen weight needs no master.
    has_masters = trains and not adapters(decoder.module)
    dtype = decoder.dtype
    if has_masters and dtype != torch.float32:
        decoder.module.float()
    return {
        "mesh": plan.mesh,
        # No backward pass would free the layers of a reference.
        "reshard_after_forward": plan.reshard_after_forward or not trains,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype if has_masters else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=plan.mesh.device_type == "cuda")
        if plan.cpu_offload
        else OffloadPolicy(),
    }


def _wrap_layers(decoder: Decoder, options: dict[str, Any]) -> _Root:
    """Shard each layer; returns the root, which is not sharded yet."""
    root = _Root()
    if isinstance(decoder, HFDecoder):
        for block in decoder.blocks:
            fully_shard(block, **options)
        root.whole = decoder.module
        return root
    if options["mesh"].device_type == "cuda" and decoder.head_dim in HEAD_DIMS:
        decoder.use_fused_layers()
    kind = _FusedLayer if decoder.is_fused else _Layer
    layers = nn.ModuleList(kind(decoder, index) for index in range(decoder.n_layers))
    for layer in layers:
        fully_shard(layer, **options)
    decoder.layer_fns = list(layers)
    root.layers = layers
    body: Any = decoder.module.model
    root.embedding, root.norm, root.head = body.embed_tokens, body.norm, decoder.module.lm_head
    return root


def _accumulate_in_float32(module: nn.Module, _: object) -> None:
    """Of the gathered weights, whose gradients are then reduced in float32."""
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.grad_dtype = torch.float32


def _move_tables(decoder: Decoder, device_type: str) -> None:
    if hasattr(decoder, "cos_PD"):
        decoder.cos_PD = decoder.cos_PD.to(device_type)
        decoder.sin_PD = decoder.sin_PD.to(device_type)
