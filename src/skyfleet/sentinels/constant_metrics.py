"""Metrics that cannot move under a configuration, and why: so that nobody reads a meaning into them."""

from __future__ import annotations

from collections.abc import Mapping

from skyfleet.config.root import RunConfig

_CLIPPED = {"ppo_clip_ratio": 0}
_TO_OLD: Mapping[str, Mapping[str, int]] = {
    **dict.fromkeys(("regular", "dual_clip", "gspo", "clip_cov"), _CLIPPED),
    "cispo": {**_CLIPPED, "cispo_ratio_{mean,clamped_mean,max,min}": 1},
    "importance_sampling": {"importance_ratio": 1},
}
"""Loss -> what it tells of the ratio to the policy as the step began, and what that is at 1."""
_TO_ENGINE: Mapping[str, Mapping[str, int]] = {
    **dict.fromkeys(("dppo", "rollout_is"), _CLIPPED),
    "cispo": _TO_OLD["cispo"],
}
"""The same of the ratio to what the engine said."""


def constant_metrics(config: RunConfig) -> Mapping[str, str]:
    """Key, or `{}` of several -> why it stays.

    The ratio to the old policy is 1 with every engine: where one only comes near, the learner asks
    itself. That to the engine is 1 in float32, where both compute the same.
    """
    trainer, algorithm = config.trainer, config.trainer.algorithm
    n_batches = trainer.train_batch_size // trainer.policy_mini_batch_size
    one_update = trainer.update_epochs_per_batch * n_batches == 1
    exact = config.generator.backend == "embedded" and trainer.bf16 is False
    loss, still = algorithm.policy_loss_type, dict[str, str]()
    to_engine = loss != "cispo" or algorithm.cispo.cispo_anchor == "rollout"
    table = _TO_ENGINE if to_engine and loss in _TO_ENGINE else _TO_OLD
    if one_update and (exact or table is _TO_OLD):
        for name, value in table.get(loss, {}).items():
            still[f"policy/{name}"] = (
                f"stays {value}: with one update a batch the ratio is 1 wherever it is measured. It "
                "says nothing about the learning rate"
            )
    if one_update and loss == "kl_cov":
        still["policy/kl_cov_ratio"] = (
            f"stays near {algorithm.kl_cov.kl_cov_frac:g} and holds nothing back: with one update a "
            "batch no token has moved, so the penalty is 0. Lower trainer.policy_mini_batch_size for it"
        )
    if exact and algorithm.off_policy_correction.active:
        still["policy/is_ratio_{mean,max,min}"] = (
            "stays 1: engine and learner compute the same, so there is nothing to correct"
        )
    return still
