"""Algorithm section: advantage estimator, policy loss, reduction, KL and filters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from skyfleet.config.section import PositiveOrMinusOne, Section

# Where the object of each name lives. The objects carry everything else that is known of an
# algorithm; only their names are needed here, to check a configuration without importing them.
_ADVANTAGES = "skyfleet.algorithms.advantages"
ADVANTAGE_ESTIMATORS = {
    "grpo": f"{_ADVANTAGES}:GRPO",
    "rloo": f"{_ADVANTAGES}:RLOO",
    "maxrl": f"{_ADVANTAGES}:MAXRL",
    "reinforce++": f"{_ADVANTAGES}:REINFORCE_PLUS_PLUS",
    "gae": f"{_ADVANTAGES}:GAE",
    "distillation": f"{_ADVANTAGES}:DISTILLATION",
}
_LOSSES = "skyfleet.algorithms.losses"
POLICY_LOSSES = {
    "regular": f"{_LOSSES}.ppo:REGULAR",
    "dual_clip": f"{_LOSSES}.ppo:DUAL_CLIP",
    "gspo": f"{_LOSSES}.ppo:GSPO",
    "cispo": f"{_LOSSES}.policy_gradient:CISPO",
    "sapo": f"{_LOSSES}.policy_gradient:SAPO",
    "dppo": f"{_LOSSES}.policy_gradient:DPPO",
    "clip_cov": f"{_LOSSES}.covariance:CLIP_COV",
    "kl_cov": f"{_LOSSES}.covariance:KL_COV",
    "rollout_is": f"{_LOSSES}.policy_gradient:ROLLOUT_IS",
    "importance_sampling": f"{_LOSSES}.policy_gradient:IMPORTANCE_SAMPLING",
    "cross_entropy": f"{_LOSSES}.policy_gradient:CROSS_ENTROPY",
}


def _one_of(names: Collection[str]) -> Callable[[str], str]:
    def check_name(value: str) -> str:
        if value not in names and ":" not in value:
            raise ValueError("is neither a known name nor module:function")
        return value

    check_name.__doc__ = f"{', '.join(names)}, or module:function of your own"
    return check_name


EstimatorName = Annotated[str, AfterValidator(_one_of(ADVANTAGE_ESTIMATORS))]
PolicyLossName = Annotated[str, AfterValidator(_one_of(POLICY_LOSSES))]
LossReduction = Literal[
    "token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"
]
KlEstimatorType = Literal["k1", "k2", "k3", "abs"]


class KlCtrl(Section):
    """Only for use_kl_in_reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_target: float = Field(0.1, gt=0)
    """Target of the adaptive coefficient: the KL per token."""
    horizon: int = Field(10000, ge=1)
    """Sequences over which the adaptive coefficient reacts; more than a fifth of those of a step."""


class DynamicSampling(Section):
    type: Literal["filter", "replace"] | None = None
    """filter samples more prompts until the batch is full; replace repeats informative groups."""
    max_sample_batches: PositiveOrMinusOne = 30
    """Stop the run after this many batches; -1 never does."""
    min_replace_ratio: float = Field(0.3, ge=0, le=1)
    """replace accepts a batch if more than this share of its groups is informative."""


class Sapo(Section):
    tau_pos: float = Field(1.0, gt=0)
    """Temperature of the gate for positive advantages."""
    tau_neg: float = Field(1.05, gt=0)
    """Temperature of the gate for the other advantages."""


class ClipCov(Section):
    clip_ratio: float = Field(0.0002, gt=0, le=1)
    """Share of the tokens that are masked."""
    clip_cov_lb: float = 1.0
    """Only tokens with a covariance above this are candidates."""
    clip_cov_ub: float = 5.0
    """Only tokens with a covariance below this are candidates."""


class KlCov(Section):
    kl_cov_frac: float = Field(0.2, gt=0, le=1)
    """Share of the tokens, those of highest covariance, that are penalized."""
    ppo_kl_coef: float = Field(1.0, ge=0)
    """Coefficient of the penalty."""


class Cispo(Section):
    cispo_eps_clip_low: float = Field(1.0, ge=0)
    """The ratio is clamped below at 1 - this. SkyRL's older default, 0, clamps at 1."""
    cispo_eps_clip_high: float = Field(4.0, ge=0)
    """The ratio is clamped above at 1 + this."""
    cispo_anchor: Literal["old", "rollout"] = "old"
    """old: the ratio is to the policy at the start of the step; rollout: to the engine's logprobs."""


class Dppo(Section):
    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    delta_low: float = Field(0.2, ge=0)
    """Tokens with a negative advantage are dropped beyond this distance."""
    delta_high: float = Field(0.2, ge=0)
    """Tokens with a positive advantage are dropped beyond this distance."""


class OffPolicyCorrection(Section):
    """For an engine whose logprobs differ from the learner's; ratios are learner over engine."""

    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Weight each token by its own ratio, or by that of its sequence, up to a cap."""
    token_tis_ratio_clip_high: float = Field(2.0, gt=0)
    sequence_tis_ratio_clip_high: float = Field(5.0, gt=0)
    sequence_mask_metric: Literal["geometric", "product"] | None = None
    """Mask sequences whose geometric mean ratio, or product of ratios, is outside its bounds."""
    geo_mask_high: float = Field(1.01, gt=0)
    geo_mask_low: float = Field(0.99, ge=0)
    product_mask_high: float = Field(2.0, gt=0)
    product_mask_low: float = Field(0.5, ge=0)
    outlier_token_is_threshold_low: float | None = Field(None, ge=0)
    """Mask sequences with a token whose ratio is below this."""
    outlier_token_is_threshold_high: float | None = Field(None, gt=0)
    """Mask sequences with a token whose ratio is above this."""
    token_mask_is_threshold_low: float | None = Field(None, ge=0)
    """Mask single tokens whose ratio is below this; needs the upper bound too."""
    token_mask_is_threshold_high: float | None = Field(None, gt=0)
    """Mask single tokens whose ratio is above this; needs the lower bound too."""

    @property
    def active(self) -> bool:
        """Whether any correction is on."""
        bounds = (
            self.outlier_token_is_threshold_low,
            self.outlier_token_is_threshold_high,
            self.token_mask_is_threshold_low,
            self.token_mask_is_threshold_high,
        )
        named = self.tis_ratio_type or self.sequence_mask_metric
        return named is not None or any(bound is not None for bound in bounds)


class Algorithm(Section):
    advantage_estimator: EstimatorName = "grpo"
    """distillation learns from a teacher, trainer.ref.model.path, not from rewards."""
    advantage_estimator_kwargs: dict[str, Any] = Field({})
    """Keyword arguments of your own estimator."""
    grpo_norm_by_std: bool = True
    """Divide the advantage by the standard deviation of the group."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token; reinforce++ and gae only."""
    lambd: float = Field(1.0, ge=0, le=1)
    """gae: 1 uses the reward alone, 0 the critic's value of the next token."""
    advantage_batch_normalize: bool = False
    """Standardize advantages over the whole batch."""
    zero_variance_filter: bool = False
    """Drop groups whose attempts all earned the same reward."""
    zero_variance_filter_tol: float = Field(1e-6, ge=0)
    """Rewards this close count as equal."""
    dynamic_sampling: DynamicSampling = DynamicSampling()
    overlong_buffer_len: int | None = Field(None, ge=1)
    """Tokens before overlong_max_len over which the reward falls; null does not penalize length."""
    overlong_buffer_penalty_factor: float = Field(1.0, ge=0)
    """Subtracted from the reward of an attempt of overlong_max_len tokens or more."""
    overlong_max_len: int | None = Field(None, ge=1)
    """Tokens that an attempt may sample in all turns; with one turn null is max_generate_length."""
    policy_loss_type: PolicyLossName = "regular"
    """regular is PPO's clipped ratio."""
    policy_loss_kwargs: dict[str, Any] = Field({})
    """Keyword arguments of your own loss."""
    loss_reduction: LossReduction = "token_mean"
    max_seq_len: int | None = Field(None, ge=1)
    """Tokens; the constant seq_mean_token_sum_norm divides by."""
    eps_clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - this."""
    eps_clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + this."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """dual_clip: upper bound of the ratio for negative advantages."""
    sapo: Sapo = Sapo()
    clip_cov: ClipCov = ClipCov()
    kl_cov: KlCov = KlCov()
    cispo: Cispo = Cispo()
    dppo: Dppo = Dppo()
    off_policy_correction: OffPolicyCorrection = OffPolicyCorrection()
    value_clip: float | None = Field(0.2, ge=0)
    """gae: how far the critic's value of a token may move per step; null does not clip."""
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
    """Divides the logits of policy and reference when logprobs are computed for the loss. If it is
    not the temperature of the rollouts, the learner ignores the engine's logprobs."""

    def find_problems(self) -> Iterator[str]:
        if self.use_kl_loss and self.use_kl_in_reward:
            yield (
                "trainer.algorithm.use_kl_loss=true and trainer.algorithm.use_kl_in_reward=true "
                "would count the KL twice; set one of them to false"
            )
        cov, masks = self.clip_cov, self.off_policy_correction
        low, high = masks.token_mask_is_threshold_low, masks.token_mask_is_threshold_high
        if (low is None) != (high is None):
            yield (
                "trainer.algorithm.off_policy_correction.token_mask_is_threshold_* has one bound; set "
                "both or neither"
            )
        bounds: dict[str, tuple[float | None, float | None]] = {
            "clip_cov.clip_cov_lb": (cov.clip_cov_lb, cov.clip_cov_ub),
            "off_policy_correction.geo_mask_low": (masks.geo_mask_low, masks.geo_mask_high),
            "off_policy_correction.product_mask_low": (
                masks.product_mask_low,
                masks.product_mask_high,
            ),
            "off_policy_correction.outlier_token_is_threshold_low": (
                masks.outlier_token_is_threshold_low,
                masks.outlier_token_is_threshold_high,
            ),
            "off_policy_correction.token_mask_is_threshold_low": (low, high),
        }
        for key, (lower, upper) in bounds.items():
            if lower is not None and upper is not None and lower >= upper:
                yield (
                    f"trainer.algorithm.{key}={lower} is not below its upper bound, {upper}; lower it"
                )
