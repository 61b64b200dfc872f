"""The loss is given every chosen token once an epoch, with the credit it was assigned."""

from __future__ import annotations

from math import fsum

import torch

from skyfleet.sentinels.advantages import groups_again
from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Learned

NEARLY = 1e-3


def loss_inputs(learned: Learned) -> Finding | None:
    epochs = learned.expected.update_epochs
    tokens = epochs * sum(digest.n_action_tokens for digest in learned.digests)
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
    again = learned.expected.credited_again
    if again and (wrong := _whitened(learned) if again == "batch" else _centred(learned)):
        return wrong
    epochs = learned.expected.update_epochs
    totals = [digest.advantages for digest in learned.digests]
    products = [digest.advantages * digest.logprobs for digest in learned.digests]
    total, product = epochs * fsum(totals), epochs * fsum(products)
    size = epochs * fsum(map(abs, totals))
    seen_total, seen_size, seen_product = learned.seen.credit()
    evidence = {"sum": total, "seen_sum": seen_total, "size": size, "seen_size": seen_size}
    # Both: what is centred sums to nothing, however it is scaled.
    if max(abs(seen_total - total), abs(seen_size - size)) > NEARLY * (size + NEARLY):
        return found("the advantages in the loss are not those that were estimated", **evidence)
    if abs(seen_product - product) > NEARLY * (epochs * fsum(map(abs, products)) + NEARLY):
        return found(
            "the advantages in the loss are at other sequences than they were estimated for",
            **evidence,
            product=product,
            seen_product=seen_product,
        )
    return None


def _centred(learned: Learned) -> Finding | None:
    return groups_again(learned.samples, unit_deviation=learned.expected.unit_deviation)


def _whitened(learned: Learned) -> Finding | None:
    """Whitened; and nothing at all only where every attempt earned the same."""
    values_N = torch.cat(learned.seen.advantages).double()
    if not values_N.any():
        earned = {sample.group_rewards[sample.attempt] for sample in learned.samples}
        if len(earned) > 1:
            return found("attempts earned differently and no token has an advantage", n=len(earned))
        return None
    mean, deviation = float(values_N.mean()), float(values_N.std(correction=0))
    # Less than 1 where tokens hardly differ: whitening divides by a little more than their deviation.
    if abs(mean) < NEARLY and deviation < 1 + NEARLY:
        return None
    return found(
        "the advantages that the learner gave have another mean than 0 or deviate by more than 1",
        mean=mean,
        deviation=deviation,
        tokens=len(values_N),
    )
