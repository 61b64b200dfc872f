"""Gradient metrics: norms per layer and per kind of weight, and three of Fleet's."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from math import nan

import torch
from torch import Tensor, nn

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_KINDS = {
    "self_attn": "attention",
    "mlp": "mlp",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "norm": "norms",
}
"""Part of a parameter name -> its kind; the first match counts."""
_BITS_PER_EDIT, _EDITED_SHARE = 3.6, 0.05
"""Fleet's constants: bits per weight, and the gradient-to-weight ratio above which it is edited."""
_NOISE = 1e-6
"""Relative to the largest singular value; smaller ones are rounding errors."""


@torch.no_grad()
def gradient_metrics(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
    """`grad_norm/layer_N`, `grad_norm/{kind}` and three of Fleet's, before any clipping.

    The squared norms of the layers and of the parameters outside layers sum to the squared total;
    so do those of the kinds. `grad:snr` is |mean| / standard deviation of the entries,
    `effective_rank` the mean over matrices of exp(entropy of their singular values), and
    `megabytes_edited` the size of the weights with a large gradient.
    """
    squares: dict[str, list[Tensor]] = defaultdict(list)
    edited: list[Tensor] = []
    sums: list[Tensor] = []
    ranks: list[Tensor] = []
    n_entries = 0
    for name, parameter in named:
        if parameter.grad is None:
            continue
        square = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square()
        squares[_kind(name)].append(square)
        if layer := _LAYER.search(name):
            squares[f"layer_{layer[1]}"].append(square)
        edited.append((parameter.grad.abs() > _EDITED_SHARE * parameter.abs()).sum())
        sums.append(torch.stack([parameter.grad.sum(dtype=torch.float64), square.double()]))
        n_entries += parameter.grad.numel()
        if parameter.grad.dim() == 2:
            ranks.append(_effective_rank(parameter.grad))
    norms = {f"grad_norm/{key}": float(torch.stack(s).sum().sqrt()) for key, s in squares.items()}
    n_edited = int(torch.stack(edited).sum()) if edited else 0
    return norms | {
        "megabytes_edited": _BITS_PER_EDIT * n_edited / 8 / 2**20,
        "grad:snr": _snr(sums, n_entries),
        "effective_rank": float(torch.stack(ranks).mean()) if ranks else 0.0,
    }


def _snr(sums: list[Tensor], n_entries: int) -> float:
    if not sums:
        return 0.0
    total, square = (float(x) / n_entries for x in torch.stack(sums).sum(dim=0))
    deviation = max(square - total * total, 0.0) ** 0.5
    return abs(total) / deviation if deviation else 0.0


def _effective_rank(gradient_FE: Tensor) -> Tensor:
    """Between 1 and the shorter side (Roy and Vetterli 2007); 0 for a zero matrix."""
    # In float64: in float32 the squares of small values are lost to rounding.
    wide = gradient_FE.double()
    gram = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
    if not torch.isfinite(gram).all():
        return gram.new_tensor(nan)
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    values = values * (values > _NOISE * values.max())
    probabilities = values / values.sum().clamp(min=1e-30)
    rank: Tensor = torch.special.entr(probabilities).sum().exp() * (values.sum() > 0)
    return rank


def _kind(name: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in name), "other")
