"""LoRA: low-rank adapters that are always merged into the weights they adapt.

A layer's `weight` equals base + scale·B·A at all times, so engines need no support for adapters.
Only the backward pass knows A and B.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from skyfleet.config.policy import Lora
from skyfleet.errors import ModelError
from skyfleet.models.fused.lora_gradients import attach_lora_gradients

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
_KEY = "trainer.policy.model.lora.target_modules"
_MERGE_CHUNK = 2**24
"""Weights merged per step: rounding offsets take 40 bytes per weight."""


class LoraLinear(nn.Linear):
    base: Tensor
    """The weight before any adapter."""
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    rank: int
    alpha: int
    n_columns: int = 0
    """Of the whole layer, if this is a part of it that begins at these indices."""
    first_row: int = 0
    first_column: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, input: Tensor) -> Tensor:
        return attach_lora_gradients(linear(input, self.weight, self.bias), input, [self])

    def merged(self) -> Tensor:
        """Compute the merged weight: summed in float32, rounded once. Of a shard, this rank's part."""
        if isinstance(self.base, DTensor):
            return self._merge(*_local_parts(self))
        return self._merge(self.base, self.lora_A, self.lora_B, 0)

    def _merge(self, base_OI: Tensor, a_RI: Tensor, b_OR: Tensor, first_row: int) -> Tensor:
        if base_OI.dtype == torch.float32:
            return torch.addmm(base_OI, b_OR, a_RI, alpha=self.scale)
        merged_OI = torch.empty_like(base_OI)
        n_columns = self.n_columns or self.in_features
        for first in range(0, len(base_OI), rows := max(1, _MERGE_CHUNK // self.in_features)):
            here = slice(first, first + rows)
            total_RI = torch.addmm(base_OI[here].float(), b_OR[here], a_RI, alpha=self.scale)
            first_index = (self.first_row + first_row + first) * n_columns + self.first_column
            total_RI += rounding_offsets(base_OI[here], first_index, n_columns)
            merged_OI[here] = total_RI
        return merged_OI


def _local_parts(layer: LoraLinear) -> tuple[Tensor, Tensor, Tensor, int]:
    """This rank's rows of the base and of B, the whole A, and the index of the first row."""
    base, a, b = layer.base, layer.lora_A, layer.lora_B
    assert isinstance(base, DTensor)
    assert isinstance(a, DTensor)
    assert isinstance(b, DTensor)
    n_ranks, rank = base.device_mesh.size(-1), base.device_mesh.get_local_rank(-1)
    a_RI, b_OR = (
        a.full_tensor(),
        b.to_local(),
    )  # those of a policy on the CPU are gathered on its device
    rows = math.ceil(base.shape[0] / n_ranks)
    return base.to_local(), a_RI.to(b_OR.device), b_OR, rank * rows


def rounding_offsets(base_OI: Tensor, first_index: int = 0, n_columns: int | None = None) -> Tensor:
    """An offset per weight, below half a step of its precision, that is added before rounding
    (dithering).

    A base weight is exactly representable, so plain rounding would lose most small updates for many
    optimiser steps. With a different offset per weight, as many weights move as are needed to be
    right on average. Where the update is zero, no weight moves. `first_index` is that of the first
    weight in a matrix of `n_columns`, of which a rank may hold a part.
    """
    mantissa_OI, exponent_OI = torch.frexp(base_OI.float())
    # The step above a weight; below a power of two it is half as wide, and at 0 there is none.
    half = torch.full_like(mantissa_OI, torch.finfo(base_OI.dtype).eps / 2)
    step_OI = torch.ldexp(half, exponent_OI)
    step_OI = torch.where(mantissa_OI.abs() == 0.5, step_OI / 2, step_OI) * (base_OI != 0)
    # Multiples of the golden ratio are spread evenly, and are the same on every device.
    index_OI = torch.arange(base_OI.numel(), device=base_OI.device).view_as(base_OI)
    if n_columns is not None and n_columns != base_OI.shape[-1]:
        skipped = n_columns - base_OI.shape[-1]
        index_OI = index_OI + skipped * torch.arange(len(base_OI), device=base_OI.device)[:, None]
    index_OI = first_index + index_OI
    spread_OI = (index_OI * 2_654_435_769 % 2**32).float() / 2**32
    # Slightly below one half, to which the sum in float32 could be rounded.
    return 0.999 * step_OI * (spread_OI - 0.5)


def add_adapters(module: nn.Module, settings: Lora, *, seed: int) -> None:
    """Add adapters to the chosen linear layers and freeze everything else.

    The output does not change.
    """
    module.requires_grad_(False)
    rng = torch.Generator().manual_seed(seed)
    targets = find_target_layers(module, settings)
    if ALL_LINEAR in _as_list(settings.target_modules):
        _warn_about_experts(module, targets.values())
    for layer in targets.values():
        _adapt_layer(layer, settings, rng)


def adapters(module: nn.Module) -> dict[str, LoraLinear]:
    return {name: m for name, m in module.named_modules() if isinstance(m, LoraLinear)}


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Rewrite the merged weights in place after A and B have changed."""
    for layer in adapters(module).values():
        weight = layer.weight
        (weight.to_local() if isinstance(weight, DTensor) else weight).copy_(layer.merged())


@torch.no_grad()
def find_unmerged(module: nn.Module) -> list[str]:
    """Names of layers whose weight differs from base + scale·B·A."""
    layers = adapters(module).items()
    return [name for name, layer in layers if not torch.equal(layer.weight, layer.merged())]


def merged_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of the merged model, without adapter tensors."""
    state: dict[str, Tensor] = module.state_dict()
    return {
        name: weight for name, weight in state.items() if not name.endswith((".lora_A", ".lora_B"))
    }


def strip_adapters(module: nn.Module, *, merged: bool) -> nn.Module:
    """A plain model over the same storage: merged, or the base before adaptation."""
    shared: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()
    }
    shared |= {id(buffer): buffer for buffer in module.buffers()}
    plain = copy.deepcopy(module, shared)
    for layer in adapters(plain).values():
        if not merged:
            layer.weight = nn.Parameter(layer.base, requires_grad=False)
        del layer.base, layer.lora_A, layer.lora_B
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    return plain


def _adapt_layer(layer: nn.Linear, settings: Lora, rng: torch.Generator) -> None:
    # Keep the object, because decoders and engines hold it.
    layer.__class__ = LoraLinear
    assert isinstance(layer, LoraLinear)
    layer.rank, layer.alpha = settings.rank, settings.alpha
    layer.register_buffer("base", layer.weight.detach().clone(), persistent=False)
    # Drawn on the CPU, so that every device starts equal. B is zero, so the output is unchanged.
    a_RE = torch.empty(settings.rank, layer.in_features)
    nn.init.kaiming_uniform_(a_RE, a=math.sqrt(5), generator=rng)
    b_OR = torch.zeros(layer.out_features, settings.rank)
    layer.lora_A = nn.Parameter(a_RE.to(layer.weight.device))
    layer.lora_B = nn.Parameter(b_OR.to(layer.weight.device))


def find_target_layers(module: nn.Module, settings: Lora) -> dict[str, nn.Linear]:
    """Target layers by name, without the head as in PEFT, because it is often tied to the
    embedding."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    linears = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }
    targets, excluded = _as_list(settings.target_modules), _as_list(settings.exclude_modules)
    for target in targets:
        if target != ALL_LINEAR and not any(_matches(name, target) for name in linears):
            names = sorted({name.split(".")[-1] for name in linears})
            raise ModelError(
                f"{_KEY}={target!r} matches no linear layer of {type(module).__name__}; "
                f"choose from {names} or {ALL_LINEAR}"
            )
    chosen = {
        name: layer
        for name, layer in linears.items()
        if any(target == ALL_LINEAR or _matches(name, target) for target in targets)
        and not any(_matches(name, target) for target in excluded)
    }
    if not chosen:
        raise ModelError(
            f"{_KEY}={settings.target_modules!r} with exclude_modules="
            f"{settings.exclude_modules!r} selects no linear layer of {type(module).__name__}; "
            f"use {ALL_LINEAR} and exclude less, or train every weight with rank 0"
        )
    return chosen


def _warn_about_experts(module: nn.Module, chosen: Iterable[nn.Linear]) -> None:
    weights = list(module.parameters())
    if any(weight.ndim > 2 for weight in weights):
        share = sum(x.weight.numel() for x in chosen) / sum(w.numel() for w in weights)
        logger.warning(
            "%s=%s does not cover the experts of %s, which are not linear layers: %.1f %% of its "
            "weights are adapted; to train them all, set trainer.policy.model.lora.rank=0",
            *(_KEY, ALL_LINEAR, type(module).__name__, 100 * share),
        )


def _as_list(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _matches(name: str, target: str) -> bool:
    """A target matches a layer's full path or the end of it, as in PEFT."""
    return name == target or name.endswith(f".{target}")
