"""The reference begins as the policy: before the first update the KL between them is nothing."""

from __future__ import annotations

import torch

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.hops import Learned


def reference(learned: Learned) -> Finding | None:
    seen = learned.seen
    if learned.step != 1 or not learned.expected.own_reference or not seen.reference:
        return None
    n = learned.n_first
    gap = float((torch.cat(seen.logprobs)[:n] - torch.cat(seen.reference)[:n]).abs().mean())
    if gap > learned.expected.logprob_tolerance:
        return found(
            "the reference is the policy as it began and scores its tokens otherwise; it has other "
            "weights or another temperature",
            mean_abs_gap=gap,
            tolerance=learned.expected.logprob_tolerance,
            tokens=n,
        )
    return None
