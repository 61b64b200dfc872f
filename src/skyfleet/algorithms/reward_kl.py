"""KL in reward: what an attempt earned, less what it cost to leave the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from skyfleet.algorithms.kl import KlControl, KlEstimator
from skyfleet.algorithms.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKl:
    estimate: KlEstimator
    coef: float
    """Of the first batch."""
    control: KlControl
    credit: Callable[[Sequence[Sample]], list[Sample]]
    """Advantages of the rewards that are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalised:
    samples: list[Sample]
    kl: float
    """Mean over sequences of each one's mean over its chosen tokens."""
    kl_max: float
    """Mean over sequences of each one's largest, signs aside."""


def penalised(
    samples: Sequence[Sample],
    ref_logprobs: Sequence[Sequence[float]],
    estimate: KlEstimator,
    *,
    coef: float,
) -> Penalised:
    """Every chosen token pays `coef` times its KL; `ref_logprobs` holds one for each of them."""
    paying: list[Sample] = []
    means: list[float] = []
    peaks: list[float] = []
    for sample, reference in zip(samples, ref_logprobs, strict=True):
        own = sample.at_chosen(sample.old_logprobs or sample.logprobs)
        kl_T = estimate(torch.tensor(own), torch.tensor(reference))
        paying.append(replace(sample, penalties=sample.spread((max(coef, 0.0) * kl_T).tolist())))
        means.append(float(kl_T.mean()))
        peaks.append(float(kl_T.abs().max()))
    return Penalised(samples=paying, kl=fmean(means), kl_max=fmean(peaks))
