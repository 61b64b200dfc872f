"""Algorithm: how rewards become a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from skyfleet.config.section import PositiveOrMinusOne, Section

ADVANTAGE_ESTIMATORS = ("grpo", "rloo", "maxrl", "reinforce++", "gae", "distillation")
POLICY_LOSSES = (
    *("regular", "dual_clip", "gspo", "cispo", "sapo", "dppo", "clip_cov", "kl_cov"),
    *("rollout_is", "importance_sampling", "cross_entropy"),
)


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def named(value: str) -> str:
        if value not in names and ":" not in value:
            raise ValueError("is neither a known name nor module:function")
        return value

    named.__doc__ = f"{', '.join(names)}, or module:function of your own"
    return named


AdvantageEstimator = Annotated[str, AfterValidator(_one_of(ADVANTAGE_ESTIMATORS))]
PolicyLossType = Annotated[str, AfterValidator(_one_of(POLICY_LOSSES))]
LossReduction = Literal[
    "token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"
]
KlEstimatorType = Literal["k1", "k2", "k3", "abs"]


class KlCtrl(Section):
    """Only for use_kl_in_reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_target: float = Field(0.1, gt=0)
    """Where adaptive steers the KL of a token."""
    horizon: int = Field(10000, ge=1)
    """Sequences over which the adaptive coefficient reacts; more than a fifth of a step's."""


class DynamicSampling(Section):
    type: Literal["filter", "replace"] | None = None
    """filter draws more prompts until the batch is full; replace repeats informative groups."""
    max_sample_batches: PositiveOrMinusOne = 30
    """Give up after so many batches; -1 never."""
    min_replace_ratio: float = Field(0.3, ge=0, le=1)
    """replace takes a batch in which more than this share of the groups is informative."""


class Sapo(Section):
    tau_pos: float = Field(1.0, gt=0)
    """How fast the gate closes where the advantage is positive."""
    tau_neg: float = Field(1.05, gt=0)
    """The same where it is not."""


class ClipCov(Section):
    clip_ratio: float = Field(0.0002, gt=0, le=1)
    """Share of the tokens left out."""
    clip_cov_lb: float = 1.0
    """They are drawn from those whose covariance is above this."""
    clip_cov_ub: float = 5.0
    """And below this."""


class KlCov(Section):
    kl_cov_frac: float = Field(0.2, gt=0, le=1)
    """Share of the tokens, those of highest covariance, that are held back."""
    ppo_kl_coef: float = Field(1.0, ge=0)
    """How hard."""


class Cispo(Section):
    cispo_eps_clip_low: float = Field(1.0, ge=0)
    """The ratio is clamped below at 1 - this. SkyRL's older default, 0, clamps at 1."""
    cispo_eps_clip_high: float = Field(4.0, ge=0)
    """The ratio is clamped above at 1 + this."""
    cispo_anchor: Literal["old", "rollout"] = "old"
    """The ratio is to the policy as the step began, or to the engine's own logprobs."""


class Dppo(Section):
    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    delta_low: float = Field(0.2, ge=0)
    """A token that should become rarer counts until it is this far."""
    delta_high: float = Field(0.2, ge=0)
    """A token that should become likelier counts until it is this far."""


class OffPolicyCorrection(Section):
    """For an engine whose logprobs are not the learner's; ratios are learner over engine."""

    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Weigh each token by its own ratio, or by that of its sequence, up to a cap."""
    token_tis_ratio_clip_high: float = Field(2.0, gt=0)
    sequence_tis_ratio_clip_high: float = Field(5.0, gt=0)
    sequence_mask_metric: Literal["geometric", "product"] | None = None
    """Leave out sequences whose mean ratio, or product of ratios, is outside its bounds."""
    geo_mask_high: float = Field(1.01, gt=0)
    geo_mask_low: float = Field(0.99, ge=0)
    product_mask_high: float = Field(2.0, gt=0)
    product_mask_low: float = Field(0.5, ge=0)
    outlier_token_is_threshold_low: float | None = Field(None, ge=0)
    """Leave out sequences with a token whose ratio is below this."""
    outlier_token_is_threshold_high: float | None = Field(None, gt=0)
    """Or above this."""
    token_mask_is_threshold_low: float | None = Field(None, ge=0)
    """Leave out single tokens whose ratio is below this; needs the upper bound too."""
    token_mask_is_threshold_high: float | None = Field(None, gt=0)
    """Or above this; needs the lower bound too."""

    @property
    def active(self) -> bool:
        """Some ratio is looked at."""
        bounds = (
            self.outlier_token_is_threshold_low,
            self.outlier_token_is_threshold_high,
            self.token_mask_is_threshold_low,
            self.token_mask_is_threshold_high,
        )
        named = self.tis_ratio_type or self.sequence_mask_metric
        return named is not None or any(bound is not None for bound in bounds)


class Algorithm(Section):
    advantage_estimator: AdvantageEstimator = "grpo"
    """distillation learns from a teacher, trainer.ref.model.path, and not from rewards."""
    advantage_estimator_kwargs: dict[str, Any] = Field({})
    """Keyword arguments of an estimator of your own."""
    grpo_norm_by_std: bool = True
    """Divide the advantage by the group's standard deviation."""
    gamma: float = Field(1.0, ge=0, le=1)
    """What a reward loses with each token before it; reinforce++ and gae only."""
    lambd: float = Field(1.0, ge=0, le=1)
    """gae: 1 trusts what was earned, 0 what the critic expected of the next token."""
    advantage_batch_normalize: bool = False
    """Standardise advantages over the whole batch."""
    zero_variance_filter: bool = False
    """Leave groups whose attempts all earned the same out of the loss."""
    zero_variance_filter_tol: float = Field(1e-6, ge=0)
    """Rewards this close count as the same."""
    dynamic_sampling: DynamicSampling = DynamicSampling()
    overlong_buffer_len: int | None = Field(None, ge=1)
    """Tokens before overlong_max_len over which the reward falls; null does not punish length."""
    overlong_buffer_penalty_factor: float = Field(1.0, ge=0)
    """What an attempt of overlong_max_len tokens or more loses."""
    overlong_max_len: int | None = Field(None, ge=1)
    """Tokens an attempt says in all; with one turn null is max_generate_length."""
    policy_loss_type: PolicyLossType = "regular"
    """regular is PPO's clipped ratio."""
    policy_loss_kwargs: dict[str, Any] = Field({})
    """Keyword arguments of a loss of your own."""
    loss_reduction: LossReduction = "token_mean"
    max_seq_len: int | None = Field(None, ge=1)
    """Tokens; the constant seq_mean_token_sum_norm divides by."""
    eps_clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - this."""
    eps_clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + this."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """dual_clip: the ratio counts up to this where the advantage is negative."""
    sapo: Sapo = Sapo()
    clip_cov: ClipCov = ClipCov()
    kl_cov: KlCov = KlCov()
    cispo: Cispo = Cispo()
    dppo: Dppo = Dppo()
    off_policy_correction: OffPolicyCorrection = OffPolicyCorrection()
    value_clip: float | None = Field(0.2, ge=0)
    """gae: how far the critic's value of a token may move in a step; null does not clip."""
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
    """Divides the logits when log-probabilities are computed for the loss, of the reference's too.
    At another temperature than the rollouts' the engine's own are not compared with."""
