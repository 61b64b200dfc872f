"""The reference begins as the policy: until the next update the KL between them is nothing."""

from __future__ import annotations

import torch

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Learned


def reference(learned: Learned) -> Finding | None:
    seen, expected = learned.seen, learned.expected
    if not expected.own_reference or not seen.reference or not _is_new(learned):
        return None
    n = learned.n_first
    gap = float((torch.cat(seen.logprobs)[:n] - torch.cat(seen.reference)[:n]).abs().mean())
    if gap > expected.reference_tolerance:
        return found(
            "the reference is the policy as it began, or as the last epoch ended, and scores its "
            "tokens otherwise; it has other weights or another temperature",
            mean_abs_gap=gap,
            tolerance=expected.reference_tolerance,
            tokens=n,
        )
    return None


def _is_new(learned: Learned) -> bool:
    """In the first step, and in the first after it was renewed."""
    done, interval = learned.step - 1, learned.expected.reference_interval
    return done == 0 or (interval > 0 and done % interval == 0)
