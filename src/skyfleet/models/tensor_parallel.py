"""Tensor parallel layers: each rank holds some heads and some columns of the MLP.

The residual is whole on every rank. A projection that reads it is divided by rows, and one that
writes it by columns: two sums over ranks per layer and direction (Shoeybi et al. 2019).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from skyfleet.errors import ModelError
from skyfleet.models.lora import LoraLinear

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")


class Split(Enum):
    """What a rank holds of a parameter, and whether its gradient is complete."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    PARTIAL = "partial"
    """All of it, but its gradient is the sum over ranks."""


class TensorParallel:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def spread(self, x_TE: Tensor) -> Tensor:
        """The input of divided projections: unchanged, and its gradient is summed over ranks."""
        out_TE: Tensor = _Spread.apply(x_TE, self.group)  # type: ignore[no-untyped-call]
        return out_TE

    def join(self, x_TE: Tensor) -> Tensor:
        """The sum over ranks of what they write to the residual."""
        out_TE: Tensor = _Join.apply(x_TE, self.group)  # type: ignore[no-untyped-call]
        return out_TE

    def divide(self, module: nn.Module) -> dict[str, Split]:
        """Keep this rank's part of every layer of `module`; returns what is left of each parameter."""
        splits: dict[str, Split] = {}
        for name, layer in module.named_modules():
            last = name.rpartition(".")[2]
            if isinstance(layer, nn.Linear) and last in (*_ROWS, *_COLUMNS):
                split = Split.ROWS if last in _ROWS else Split.COLUMNS
                for key, kind in self._divide_linear(layer, split, name).items():
                    splits[f"{name}.{key}"] = kind
            elif last in ("q_norm", "k_norm"):  # applied to the rank's own heads
                splits[f"{name}.weight"] = Split.PARTIAL
        return {name: splits.get(name, Split.WHOLE) for name, _ in module.named_parameters()}

    def keep(self, whole: Tensor, split: Split) -> Tensor:
        """This rank's part of a whole parameter."""
        if split in (Split.WHOLE, Split.PARTIAL):
            return whole
        return whole.chunk(self.size, dim=0 if split is Split.ROWS else 1)[self.rank].contiguous()

    def gather(self, part: Tensor, split: Split) -> Tensor:
        """The whole parameter, on every rank."""
        if split in (Split.WHOLE, Split.PARTIAL):
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=0 if split is Split.ROWS else 1)

    def _divide_linear(self, layer: nn.Linear, split: Split, name: str) -> dict[str, Split]:
        kinds = {"weight": split}
        if layer.bias is not None:
            if split is Split.COLUMNS:
                raise ModelError(
                    f"{name} has a bias, which every rank would add; set "
                    "trainer.policy.tensor_parallel_size=1"
                )
            kinds["bias"] = split
        if isinstance(layer, LoraLinear):
            by_rows = split is Split.ROWS
            kinds["lora_A"] = Split.PARTIAL if by_rows else Split.COLUMNS
            kinds["lora_B"] = Split.ROWS if by_rows else Split.PARTIAL
            layer.n_columns = layer.in_features
            layer.first_row, layer.first_column = 0, 0
            layer.base = self.keep(layer.base, split)
            if by_rows:
                layer.first_row = self.rank * len(layer.base)
            else:
                layer.first_column = self.rank * layer.base.shape[1]
        for key, kind in kinds.items():
            whole = getattr(layer, key)
            part = nn.Parameter(self.keep(whole.detach(), kind), requires_grad=whole.requires_grad)
            setattr(layer, key, part)
        layer.out_features, layer.in_features = layer.weight.shape
        return kinds


def check_heads(config: Any, size: int) -> None:
    """ModelError unless `size` ranks can share the heads and the MLP of a model evenly."""
    for name, n in (
        ("attention heads", config.num_attention_heads),
        ("key-value heads", config.num_key_value_heads),
        ("columns of its MLP", config.intermediate_size),
    ):
        if n % size:
            raise ModelError(
                f"trainer.policy.tensor_parallel_size={size} does not divide the model's {n} {name}; "
                "use a divisor"
            )


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
