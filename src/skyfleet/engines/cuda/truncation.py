"""Truncation: top-p, top-k and min-p for a batch in which each row has its own."""

from __future__ import annotations

import torch
from torch import Tensor


def truncate(
    logits_MV: Tensor, factors_M: Tensor, top_p_M: Tensor, top_k_M: Tensor, min_p_M: Tensor
) -> Tensor:
    """Minus infinity for every token that is cut: min-p, then top-k, then top-p of what is left."""
    tempered_MV = logits_MV * torch.where(factors_M == 0, 1.0, factors_M).unsqueeze(1)
    probs_MV, order_MV = torch.softmax(tempered_MV, dim=-1).sort(dim=-1, descending=True)
    keep_MV = probs_MV >= min_p_M.unsqueeze(1) * probs_MV[:, :1]
    ranks_V = torch.arange(logits_MV.shape[-1], device=logits_MV.device)
    keep_MV &= (top_k_M.unsqueeze(1) <= 0) | (ranks_V < top_k_M.unsqueeze(1))
    left_MV = probs_MV * keep_MV
    left_MV = left_MV / left_MV.sum(dim=-1, keepdim=True)
    keep_MV &= (left_MV.cumsum(dim=-1) - left_MV < top_p_M.unsqueeze(1)) | (top_p_M >= 1).unsqueeze(
        1
    )
    kept_MV = torch.zeros_like(keep_MV).scatter(1, order_MV, keep_MV)
    return logits_MV.masked_fill(~kept_MV, -torch.inf)
