"""Every term of the loss can be learned from, and a step that had a gradient moved the weights."""

from __future__ import annotations

from math import isfinite

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Learned


def gradient(learned: Learned) -> Finding | None:
    if terms := learned.seen.without_gradient:
        return found(
            "a term of the loss has no gradient, so it is measured and not learned from",
            terms=", ".join(sorted(terms)),
        )
    return None


def moved_weights(learned: Learned) -> Finding | None:
    norm = learned.report.metrics.get("policy/grad_norm", 0.0)
    lr = learned.report.metrics.get("policy/policy_lr", 0.0)
    if learned.before is None or learned.after is None or not (isfinite(norm) and norm * lr > 0):
        return None
    if learned.before.equal(learned.after):
        return found(
            "the step had a gradient and a learning rate, and no weight moved",
            grad_norm=norm,
            lr=lr,
            policy_version=learned.report.policy_version,
        )
    return None
