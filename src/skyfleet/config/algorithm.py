"""Algorithm: how rewards become a loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from skyfleet.config.section import PositiveOrMinusOne, Section

AdvantageEstimator = Literal["grpo", "rloo", "gae", "reinforce++", "maxrl"]
PolicyLossType = Literal[
    "regular",
    "dual_clip",
    "gspo",
    "cispo",
    "clip_cov",
    "kl_cov",
    "sapo",
    "rollout_is",
    "dppo",
    "cross_entropy",
    "importance_sampling",
]
LossReduction = Literal[
    "token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"
]
KlEstimatorType = Literal["k1", "k2", "k3", "abs"]


class KlCtrl(Section):
    """Only for use_kl_in_reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_target: float = Field(0.1, gt=0)
    horizon: int = Field(10000, ge=1)
    """Steps over which the adaptive coefficient reacts."""


class DynamicSampling(Section):
    type: Literal["filter", "replace"] | None = None
    """filter draws more prompts until the batch is full; replace repeats informative groups."""
    max_sample_batches: PositiveOrMinusOne = 30
    """Give up after so many batches; -1 never."""
    min_replace_ratio: float = Field(0.3, ge=0, le=1)
    """Least share of informative groups that replace accepts."""


class Algorithm(Section):
    advantage_estimator: AdvantageEstimator = "grpo"
    grpo_norm_by_std: bool = True
    """Divide the advantage by the group's standard deviation."""
    advantage_batch_normalize: bool = False
    """Standardise advantages over the whole batch."""
    zero_variance_filter: bool = False
    """Leave groups whose attempts all earned the same out of the loss."""
    zero_variance_filter_tol: float = Field(1e-6, ge=0)
    """Rewards this close count as the same."""
    dynamic_sampling: DynamicSampling = DynamicSampling()
    policy_loss_type: PolicyLossType = "regular"
    """regular is PPO's clipped ratio."""
    loss_reduction: LossReduction = "token_mean"
    max_seq_len: int | None = Field(None, ge=1)
    """Tokens; the constant seq_mean_token_sum_norm divides by."""
    eps_clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - this."""
    eps_clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + this."""
    value_clip: float | None = Field(0.2, ge=0)
    """The critic's clip range."""
    use_kl_loss: bool = True
    """Add kl_loss_coef times the KL to the reference model to the loss."""
    use_kl_in_reward: bool = False
    """Subtract the KL from the rewards instead."""
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_estimator_type: KlEstimatorType = "k3"
    kl_ctrl: KlCtrl = KlCtrl()
    use_entropy_loss: bool = False
    entropy_loss_coef: float = Field(0.01, ge=0)
    temperature: float = Field(1.0, gt=0)
    """Divides the logits when log-probabilities are computed for the loss."""
