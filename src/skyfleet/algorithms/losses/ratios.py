"""Ratios of two policies, by token and by sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def log_ratio(logprobs_T: Tensor, others_T: Tensor) -> Tensor:
    """Within ±20: a ratio is finite, however far a policy went."""
    return (logprobs_T - others_T).float().clamp(-20, 20)


def ratio(logprobs_T: Tensor, others_T: Tensor) -> Tensor:
    return log_ratio(logprobs_T, others_T).exp()


def sequence_sum(values_T: Tensor, lengths_B: Tensor) -> Tensor:
    """One sum a sequence, added up in the same order every time."""
    return torch.segment_reduce(values_T, "sum", lengths=lengths_B)


def by_token(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """A sequence's value on each of its tokens."""
    return values_B.repeat_interleave(lengths_B)
