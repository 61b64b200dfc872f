"""Metrics that cannot vary under a configuration, and why, so that nobody misreads them."""

from __future__ import annotations

from collections.abc import Mapping

from skyfleet.algorithms.registry import find_policy_loss
from skyfleet.config.root import RunConfig


def constant_metrics(config: RunConfig) -> Mapping[str, str]:
    """Metric key, or a `{}` pattern of several -> why it is constant.

    With one update per batch the ratio to the old policy is 1 for every engine: where the engine's
    logprobs are only close, the learner recomputes them. The ratio to the engine is 1 in float32,
    where both compute the same.
    """
    trainer, algorithm = config.trainer, config.trainer.algorithm
    n_batches = trainer.train_batch_size // trainer.policy_mini_batch_size
    one_update = trainer.update_epochs_per_batch * n_batches == 1
    is_stale = trainer.fully_async.enabled and trainer.fully_async.max_staleness_steps > 0
    exact = config.generator.backend == "embedded" and trainer.bf16 is False and not is_stale
    constant: dict[str, str] = {}
    loss = find_policy_loss(algorithm.policy_loss_type)
    if loss and one_update and (exact or loss.ratio_to(algorithm) != "engine"):
        reasons = loss.constant_metrics(algorithm)
        constant |= {f"policy/{name}": reason for name, reason in reasons.items()}
    if exact and algorithm.off_policy_correction.active:
        constant["policy/is_ratio_{mean,max,min}"] = (
            "stays 1: engine and learner compute the same, so there is nothing to correct"
        )
    return constant
