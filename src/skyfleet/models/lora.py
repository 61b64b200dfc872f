"""LoRA: low-rank adapters whose product is always merged into the weights they adapt.

A layer's `weight` is base + scale·B·A at all times, so engines run it like any other weight and
never hear of adapters; only the gradient knows that it belongs to A and B.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from skyfleet.config.policy import Lora
from skyfleet.errors import ModelError
from skyfleet.models.fused.low_rank import reach_adapters

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
_KEY = "trainer.policy.model.lora.target_modules"
_SLAB = 2**24
"""Weights that are merged at once: thresholds take 40 bytes for each."""


class LoraLinear(nn.Linear):
    base: Tensor
    """The weight before any adapter."""
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    rank: int
    alpha: int

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, input: Tensor) -> Tensor:
        return reach_adapters(linear(input, self.weight, self.bias), input, [self])

    def merged(self) -> Tensor:
        """What the weight has to be: summed in float32, rounded once."""
        if self.weight.dtype == torch.float32:
            return torch.addmm(self.base, self.lora_B, self.lora_A, alpha=self.scale)
        merged_OI = torch.empty_like(self.base)
        for first in range(0, self.out_features, rows := max(1, _SLAB // self.in_features)):
            here = slice(first, first + rows)
            total_RI = torch.addmm(
                self.base[here].float(), self.lora_B[here], self.lora_A, alpha=self.scale
            )
            total_RI += thresholds(self.base[here], first * self.in_features)
            merged_OI[here] = total_RI
        return merged_OI


def thresholds(base_OI: Tensor, first_place: int = 0) -> Tensor:
    """What each weight is moved by before it is rounded: less than half a step of its precision.

    A base lies on the very steps, where most of what adapters say would be rounded away for many
    optimiser steps. With a threshold of its own for each weight as many of them move as make up for
    that in the mean; where adapters say nothing, none does.
    """
    mantissa_OI, exponent_OI = torch.frexp(base_OI.float())
    # The step above a weight; below a power of two it is half as wide, and around 0 as fine as wanted.
    half = torch.full_like(mantissa_OI, torch.finfo(base_OI.dtype).eps / 2)
    step_OI = torch.ldexp(half, exponent_OI)
    step_OI = torch.where(mantissa_OI.abs() == 0.5, step_OI / 2, step_OI) * (base_OI != 0)
    # Multiples of the golden ratio lie evenly, and on every device alike.
    place_OI = first_place + torch.arange(base_OI.numel(), device=base_OI.device).view_as(base_OI)
    share_OI = (place_OI * 2_654_435_769 % 2**32).float() / 2**32
    # Not quite half, which the sum in float32 could round to a half.
    return 0.999 * step_OI * (share_OI - 0.5)


def adapt(module: nn.Module, settings: Lora, *, seed: int) -> None:
    """Give the chosen linear layers adapters and freeze all else. What is computed stays the same."""
    module.requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    targets = _targets(module, settings)
    if ALL_LINEAR in _listed(settings.target_modules):
        _warn_of_experts(module, targets.values())
    for layer in targets.values():
        _adapt_layer(layer, settings, draw)


def adapters(module: nn.Module) -> dict[str, LoraLinear]:
    return {name: m for name, m in module.named_modules() if isinstance(m, LoraLinear)}


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """A and B have moved: rewrite the weights in place, for whoever holds them."""
    for layer in adapters(module).values():
        layer.weight.copy_(layer.merged())


@torch.no_grad()
def unmerged(module: nn.Module) -> list[str]:
    """Names of layers whose weight is not what their adapter makes of it."""
    layers = adapters(module).items()
    return [name for name, layer in layers if not torch.equal(layer.weight, layer.merged())]


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """All weights by name, adapters in what they adapt."""
    state: dict[str, Tensor] = module.state_dict()
    return {
        name: weight for name, weight in state.items() if not name.endswith((".lora_A", ".lora_B"))
    }


def without_adapters(module: nn.Module, *, merged: bool) -> nn.Module:
    """A plain model over the same storage: as it stands, or as it was before it was adapted."""
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


def _adapt_layer(layer: nn.Linear, settings: Lora, draw: torch.Generator) -> None:
    # The same object stays: decoders and engines hold it.
    layer.__class__ = LoraLinear
    assert isinstance(layer, LoraLinear)
    layer.rank, layer.alpha = settings.rank, settings.alpha
    layer.register_buffer("base", layer.weight.detach().clone(), persistent=False)
    # Drawn on the CPU: every device begins alike. B is zero, so nothing is changed yet.
    a_RE = torch.empty(settings.rank, layer.in_features)
    nn.init.kaiming_uniform_(a_RE, a=math.sqrt(5), generator=draw)
    b_OR = torch.zeros(layer.out_features, settings.rank)
    layer.lora_A = nn.Parameter(a_RE.to(layer.weight.device))
    layer.lora_B = nn.Parameter(b_OR.to(layer.weight.device))


def _targets(module: nn.Module, settings: Lora) -> dict[str, nn.Linear]:
    """By name. The head is left out, as in PEFT: it is often the embedding too."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    linears = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }
    targets, excluded = _listed(settings.target_modules), _listed(settings.exclude_modules)
    for target in targets:
        if target != ALL_LINEAR and not any(_is(name, target) for name in linears):
            names = sorted({name.split(".")[-1] for name in linears})
            raise ModelError(
                f"{_KEY}={target!r} names no linear layer of {type(module).__name__}; "
                f"choose from {names} or {ALL_LINEAR}"
            )
    chosen = {
        name: layer
        for name, layer in linears.items()
        if any(target == ALL_LINEAR or _is(name, target) for target in targets)
        and not any(_is(name, target) for target in excluded)
    }
    if not chosen:
        raise ModelError(
            f"{_KEY}={settings.target_modules!r} without exclude_modules="
            f"{settings.exclude_modules!r} leaves no linear layer of {type(module).__name__}; "
            f"take {ALL_LINEAR} and exclude less, or train every weight with rank 0"
        )
    return chosen


def _warn_of_experts(module: nn.Module, chosen: Iterable[nn.Linear]) -> None:
    weights = list(module.parameters())
    if any(weight.ndim > 2 for weight in weights):
        share = sum(x.weight.numel() for x in chosen) / sum(w.numel() for w in weights)
        logger.warning(
            "%s=%s leaves out the experts of %s, which are no linear layers: %.1f %% of its weights "
            "are adapted; to train them all, set trainer.policy.model.lora.rank=0",
            *(_KEY, ALL_LINEAR, type(module).__name__, 100 * share),
        )


def _listed(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _is(name: str, target: str) -> bool:
    """A layer is named by its path or by the end of it, as in PEFT."""
    return name == target or name.endswith(f".{target}")
