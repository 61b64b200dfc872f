"""Engine and learner give the same logprobs to the same tokens; where not, the likeliest cause."""

from __future__ import annotations

from math import inf, log

import torch
from torch import Tensor

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Learned

ALIKE = 0.9
"""Correlation from which two policies are one, seen differently."""


def logprob_gap(learned: Learned) -> Finding | None:
    """On the first mini-batch: after an update the two differ because something was learned.

    An engine that draws from a part of the vocabulary gives each token more than the learner does, and
    with top_p alone at most as much more as that part must hold.
    """
    seen, expected = learned.seen, learned.expected
    if expected.least_mass is None or not seen.logprobs:
        return None
    own_N = torch.cat(seen.logprobs)[: learned.n_first]
    told_N = torch.cat(seen.behaviour)[: learned.n_first]
    allowed = -log(expected.least_mass) if expected.least_mass else inf
    gap_N = (own_N - told_N).clamp(min=0) + (told_N - own_N - allowed).clamp(min=0)
    gap = float(gap_N.mean())
    if gap <= expected.logprob_tolerance:
        return None
    own_N, told_N = own_N.double().cpu(), told_N.double().cpu()
    oldest = min(sample.policy_version for sample in learned.samples)
    stale = oldest < learned.policy_version
    return found(
        "the learner scores the sampled tokens otherwise than the engine that sampled them; "
        f"likely cause: {'stale version' if stale else cause(own_N, told_N)}",
        mean_abs_gap=gap,
        tolerance=expected.logprob_tolerance,
        tokens=len(own_N),
        mean_gap=float((own_N - told_N).mean()),
        max_gap=float((own_N - told_N).max()),
        correlation=_correlation(own_N, told_N),
        oldest_version=oldest,
        learner_version=learned.policy_version,
    )


def cause(own_N: Tensor, told_N: Tensor) -> str:
    """What a gap between learner (`own`) and engine (`told`) looks like."""
    gap_N = own_N - told_N
    size = float(gap_N.abs().mean())
    if _correlation(own_N, told_N) < ALIKE:
        return "other tokens or weights (template, cache, a sync that did not arrive)"
    if float((gap_N > 0.1 * size).double().mean()) < 0.01:
        # A part of the vocabulary, renormalised, is likelier token by token.
        return "truncation (the engine drew from a part of the vocabulary)"
    if abs(_correlation(gap_N, own_N)) > 0.5:
        # Another temperature stretches logprobs: over the learner's, the engine's have a slope
        # that is not 1.
        return "temperature"
    return "dtype (small, both ways, without a pattern)"


def _correlation(x_N: Tensor, y_N: Tensor) -> float:
    """Zero where one of them does not vary."""
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
    size = float(torch.linalg.vector_norm(x_N) * torch.linalg.vector_norm(y_N))
    return float(x_N @ y_N) / size if size else 0.0
