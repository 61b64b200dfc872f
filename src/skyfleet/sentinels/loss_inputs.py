"""The loss is given every chosen token once an epoch, with the credit it was assigned."""

from __future__ import annotations

from math import fsum

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.hops import Learned

NEARLY = 1e-3


def loss_inputs(learned: Learned) -> Finding | None:
    epochs = learned.expected.update_epochs
    tokens = epochs * sum(digest.n_chosen for digest in learned.digests)
    sequences = epochs * len(learned.samples)
    if (tokens, sequences) != (learned.seen.n_tokens, learned.seen.n_sequences):
        return found(
            "the loss saw another number of tokens or sequences than it was to learn from",
            tokens=tokens,
            seen_tokens=learned.seen.n_tokens,
            sequences=sequences,
            seen_sequences=learned.seen.n_sequences,
        )
    return None


def loss_advantages(learned: Learned) -> Finding | None:
    """Advantages reach the loss as they were estimated, each at its own sequence."""
    if learned.expected.credits_again:
        return None
    epochs = learned.expected.update_epochs
    totals = [digest.advantages for digest in learned.digests]
    products = [digest.advantages * digest.logprobs for digest in learned.digests]
    total, product = epochs * fsum(totals), epochs * fsum(products)
    seen_total, seen_product = learned.seen.credit()
    evidence = {"sum": total, "seen_sum": seen_total}
    if abs(seen_total - total) > NEARLY * (epochs * fsum(map(abs, totals)) + NEARLY):
        return found("the advantages in the loss are not those that were estimated", **evidence)
    if abs(seen_product - product) > NEARLY * (epochs * fsum(map(abs, products)) + NEARLY):
        return found(
            "the advantages in the loss are at other sequences than they were estimated for",
            **evidence,
            product=product,
            seen_product=seen_product,
        )
    return None
