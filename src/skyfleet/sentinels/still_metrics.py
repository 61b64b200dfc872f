"""Metrics that cannot move under a configuration, and why: so that nobody reads a meaning into them."""

from __future__ import annotations

from collections.abc import Mapping

from skyfleet.config.root import RunConfig

_CLIPPING = ("regular", "dual_clip", "gspo", "cispo", "clip_cov")


def still_metrics(config: RunConfig) -> Mapping[str, str]:
    """Key -> why it stays."""
    trainer = config.trainer
    n_batches = trainer.train_batch_size // trainer.policy_mini_batch_size
    clips = trainer.algorithm.policy_loss_type in _CLIPPING
    if clips and trainer.update_epochs_per_batch * n_batches == 1:
        return {
            "policy/ppo_clip_ratio": "stays 0: with one update a batch the ratio is 1 wherever it "
            "is measured. It says nothing about the learning rate"
        }
    return {}
