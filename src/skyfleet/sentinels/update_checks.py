"""Checks of the policy update: loss inputs, gradients, KL reference, logprob gap, moved weights."""

from __future__ import annotations

from math import fsum, inf, isfinite, log

import torch
from torch import Tensor

from skyfleet.learner.batching import mini_batches
from skyfleet.sentinels.advantage_checks import check_learner_advantages
from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import UpdateStage

TOLERANCE = 1e-3
SAME_POLICY = 0.9
"""Correlation of logprobs above which both are of the same policy."""


def loss_inputs(stage: UpdateStage) -> Finding | None:
    """The loss gets every action token once per epoch."""
    epochs = stage.expected.update_epochs
    tokens = epochs * sum(sums.n_action_tokens for sums in stage.sums)
    sequences = epochs * len(stage.samples)
    if (tokens, sequences) != (stage.record.n_tokens, stage.record.n_sequences):
        return found(
            "the loss got another number of tokens or sequences than the step has",
            tokens=tokens,
            seen_tokens=stage.record.n_tokens,
            sequences=sequences,
            seen_sequences=stage.record.n_sequences,
        )
    return None


def loss_advantages(stage: UpdateStage) -> Finding | None:
    """The loss gets the advantages as they were estimated, each with its own sequence."""
    if wrong := _check_learner_centred(stage):
        return wrong
    epochs = stage.expected.update_epochs
    totals = [sums.advantages for sums in stage.sums]
    products = [sums.advantages * sums.logprobs for sums in stage.sums]
    total, product = epochs * fsum(totals), epochs * fsum(products)
    size = epochs * fsum(map(abs, totals))
    seen_total, seen_size, seen_product = stage.record.sum_advantages()
    evidence = {"sum": total, "seen_sum": seen_total, "size": size, "seen_size": seen_size}
    # Both, because centred advantages sum to 0 at any scale.
    if max(abs(seen_total - total), abs(seen_size - size)) > TOLERANCE * (size + TOLERANCE):
        return found("the advantages in the loss are not those that were estimated", **evidence)
    if abs(seen_product - product) > TOLERANCE * (epochs * fsum(map(abs, products)) + TOLERANCE):
        return found(
            "the advantages in the loss belong to other sequences",
            **evidence,
            product=product,
            seen_product=seen_product,
        )
    return None


def _check_learner_centred(stage: UpdateStage) -> Finding | None:
    """If the learner computed the advantages: they are centred as the estimator promises."""
    expected = stage.expected
    if expected.learner_centred == "batch":
        return _check_whitened(stage)
    if expected.learner_centred == "group":
        return check_learner_advantages(stage.samples, unit_deviation=expected.unit_deviation)
    return None


def _check_whitened(stage: UpdateStage) -> Finding | None:
    """Whitened over the batch; all 0 only if every attempt earned the same."""
    values_N = torch.cat(stage.record.advantages).double()
    if not values_N.any():
        earned = {sample.group_rewards[sample.attempt] for sample in stage.samples}
        if len(earned) > 1:
            return found("rewards differ, but all advantages are 0", n=len(earned))
        return None
    mean, deviation = float(values_N.mean()), float(values_N.std(correction=0))
    # Below 1 if tokens hardly differ: whitening divides by slightly more than the deviation.
    if abs(mean) < TOLERANCE and deviation < 1 + TOLERANCE:
        return None
    return found(
        "the learner's advantages have a mean other than 0 or a deviation above 1",
        mean=mean,
        deviation=deviation,
        tokens=len(values_N),
    )


def gradient(stage: UpdateStage) -> Finding | None:
    """Every term of the loss has a gradient."""
    if terms := stage.record.without_gradient:
        return found(
            "a term of the loss has no gradient, so it does not train the policy",
            terms=", ".join(sorted(terms)),
        )
    return None


def reference(stage: UpdateStage) -> Finding | None:
    """A new KL reference equals the policy, so their KL is 0 until the next update."""
    record, expected = stage.record, stage.expected
    if not (expected.own_reference and record.reference_logprobs and _has_new_reference(stage)):
        return None
    n = stage.n_first_tokens
    own_N, ref_N = torch.cat(record.logprobs)[:n], torch.cat(record.reference_logprobs)[:n]
    gap = float((own_N - ref_N).abs().mean())
    if gap > expected.reference_tolerance:
        return found(
            "the KL reference is the initial policy, or that of the last epoch, but its logprobs "
            "differ; it has other weights or another temperature",
            mean_abs_gap=gap,
            tolerance=expected.reference_tolerance,
            tokens=n,
        )
    return None


def _has_new_reference(stage: UpdateStage) -> bool:
    """In the first step, and in the first one after a renewal."""
    done, interval = stage.step - 1, stage.expected.reference_interval
    return done == 0 or (interval > 0 and done % interval == 0)


def logprob_gap(stage: UpdateStage) -> Finding | None:
    """Engine and learner compute the same logprobs for the first mini-batch, before any update.

    An engine that samples from a part of the vocabulary reports higher logprobs, with top_p alone
    by at most -log(top_p).
    """
    record, expected = stage.record, stage.expected
    if expected.min_probability_mass is None or not record.logprobs:
        return None
    if expected.max_staleness and _has_stale_samples(stage):
        return None  # they have the logprobs of another policy
    own_N = torch.cat(record.logprobs)[: stage.n_first_tokens]
    engine_N = torch.cat(record.behaviour_logprobs)[: stage.n_first_tokens]
    allowed = -log(expected.min_probability_mass) if expected.min_probability_mass else inf
    gap_N = (own_N - engine_N).clamp(min=0) + (engine_N - own_N - allowed).clamp(min=0)
    gap = float(gap_N.mean())
    if gap <= expected.logprob_tolerance:
        return None
    own_N, engine_N = own_N.double().cpu(), engine_N.double().cpu()
    oldest = min(sample.policy_version for sample in stage.samples)
    stale = oldest < stage.policy_version
    return found(
        "the learner's logprobs of the sampled tokens differ from the engine's; likely cause: "
        f"{'stale version' if stale else guess_cause(own_N, engine_N)}",
        mean_abs_gap=gap,
        tolerance=expected.logprob_tolerance,
        tokens=len(own_N),
        mean_gap=float((own_N - engine_N).mean()),
        max_gap=float((own_N - engine_N).max()),
        correlation=_correlation(own_N, engine_N),
        oldest_version=oldest,
        learner_version=stage.policy_version,
    )


def _has_stale_samples(stage: UpdateStage) -> bool:
    """Whether the first mini-batch has a sample of an earlier version."""
    first = mini_batches(stage.samples, stage.expected.mini_batch_size)[0]
    return any(sample.policy_version < stage.policy_version for sample in first)


def guess_cause(own_N: Tensor, engine_N: Tensor) -> str:
    """The likely cause of a gap between the learner's (`own`) and the engine's logprobs."""
    gap_N = own_N - engine_N
    size = float(gap_N.abs().mean())
    if _correlation(own_N, engine_N) < SAME_POLICY:
        return "other tokens or weights (template, cache, a weight sync that did not arrive)"
    if float((gap_N > 0.1 * size).double().mean()) < 0.01:
        # Renormalizing a part of the vocabulary raises every logprob.
        return "truncation (the engine sampled from a part of the vocabulary)"
    if abs(_correlation(gap_N, own_N)) > 0.5:
        # Another temperature scales logprobs: the gap is correlated with the logprob.
        return "temperature"
    return "dtype (small, both ways, without a pattern)"


def _correlation(x_N: Tensor, y_N: Tensor) -> float:
    """0 if one of them does not vary."""
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
    size = float(torch.linalg.vector_norm(x_N) * torch.linalg.vector_norm(y_N))
    return float(x_N @ y_N) / size if size else 0.0


def moved_weights(stage: UpdateStage) -> Finding | None:
    """A step with a gradient and a learning rate changes the weights."""
    norm = stage.report.metrics.get("policy/grad_norm", 0.0)
    lr = stage.report.metrics.get("policy/policy_lr", 0.0)
    if stage.before is None or stage.after is None or not (isfinite(norm) and norm * lr > 0):
        return None
    if stage.before.equal(stage.after):
        return found(
            "the step had a gradient and a learning rate, but no weight changed",
            grad_norm=norm,
            lr=lr,
            policy_version=stage.report.policy_version,
        )
    return None
