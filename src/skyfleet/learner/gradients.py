"""Gradients by name: how strongly each layer and each kind of weight is pulled."""

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
"""Part of a weight's name -> its kind; the first that fits."""
_BITS_AN_EDIT, _EDITED_SHARE = 3.6, 0.05
"""Fleet's: what a weight stores, and from which share of itself a gradient edits it."""
_NOISE = 1e-6
"""Of the largest singular value: less is rounding."""


@torch.no_grad()
def gradient_metrics(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
    """`grad_norm/layer_N`, `grad_norm/{kind}` and three of Fleet's, before any clipping.

    The squares of the layers' norms and of those outside layers sum to the square of the whole;
    so do those of the kinds. `grad:snr` is the mean entry's size in deviations, `effective_rank` the
    mean over matrices of exp(entropy of their singular values), `megabytes_edited` what changes much.
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
        "megabytes_edited": _BITS_AN_EDIT * n_edited / 8 / 2**20,
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
    """Between 1 and the shorter side (Roy and Vetterli 2007); 0 of nothing."""
    # In double, because squares of small values drown in what float32 rounds off the large.
    wide = gradient_FE.double()
    gram = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
    if not torch.isfinite(gram).all():
        return gram.new_tensor(nan)
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    values = values * (values > _NOISE * values.max())
    shares = values / values.sum().clamp(min=1e-30)
    rank: Tensor = torch.special.entr(shares).sum().exp() * (values.sum() > 0)
    return rank


def _kind(name: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in name), "other")
