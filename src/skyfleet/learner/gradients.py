"""Gradients by name: how strongly each layer and each kind of weight is pulled."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

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


@torch.no_grad()
def gradient_metrics(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
    """`grad_norm/layer_N`, `grad_norm/{kind}` and `megabytes_edited`, before any clipping.

    The squares of the layers' norms and of those outside layers sum to the square of the whole;
    so do those of the kinds.
    """
    squares: dict[str, list[Tensor]] = defaultdict(list)
    edited: list[Tensor] = []
    for name, parameter in named:
        if parameter.grad is None:
            continue
        square = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square()
        squares[_kind(name)].append(square)
        if layer := _LAYER.search(name):
            squares[f"layer_{layer[1]}"].append(square)
        edited.append((parameter.grad.abs() > _EDITED_SHARE * parameter.abs()).sum())
    norms = {f"grad_norm/{key}": float(torch.stack(s).sum().sqrt()) for key, s in squares.items()}
    n_edited = int(torch.stack(edited).sum()) if edited else 0
    return norms | {"megabytes_edited": _BITS_AN_EDIT * n_edited / 8 / 2**20}


def _kind(name: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in name), "other")
