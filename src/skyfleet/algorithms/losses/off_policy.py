"""Off-policy correction: weight or mask tokens by the ratio of learner and engine probabilities.

Ratios are the learner's probability over the engine's. Nothing is renormalized: a masked token is
a zero in the same mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from skyfleet.algorithms.losses.loss import (
    LossFunction,
    LossInputs,
    LossOutput,
    expand_to_tokens,
    log_ratio,
    sequence_sum,
)
from skyfleet.config.algorithm import OffPolicyCorrection

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    weights_T: Tensor
    metrics_T: dict[str, Tensor]
    metrics_B: dict[str, Tensor]
    stats_T: dict[str, Tensor]


def with_correction(policy_loss: LossFunction, rules: OffPolicyCorrection) -> LossFunction:
    return partial(_corrected, policy_loss, rules) if rules.active else policy_loss


def _corrected(
    policy_loss: LossFunction, rules: OffPolicyCorrection, inputs: LossInputs
) -> LossOutput:
    output, correction = policy_loss(inputs), correct(inputs, rules)
    return replace(
        output,
        loss_T=output.loss_T * correction.weights_T,
        metrics_T=output.metrics_T | correction.metrics_T,
        metrics_B=output.metrics_B | correction.metrics_B,
        stats_T=output.stats_T | correction.stats_T,
    )


def correct(inputs: LossInputs, rules: OffPolicyCorrection) -> Correction:
    """Mask sequences with an outlier, then tokens, then whole sequences; each sees what is left.

    Truncated importance sampling: https://fengyao.notion.site/off-policy-rl. The token mask is
    IcePop's (Ring-1T's report, 2025); for the geometric mask see
    https://leonericsson.github.io/blog/2026-02-01-opsm-geometric-masking.
    """
    log_T = log_ratio(inputs.old_logprobs_T, inputs.behaviour_logprobs_T)
    ratio_T, lengths_B = log_T.exp(), inputs.lengths_B
    kept_T = ratio_T.new_ones(ratio_T.shape)
    metrics_T, metrics_B = dict[str, "Tensor"](), dict[str, "Tensor"]()
    low, high = rules.outlier_token_is_threshold_low, rules.outlier_token_is_threshold_high
    if low is not None or high is not None:
        outlier_T = ~_between(ratio_T, low, high)
        outlier_B = (sequence_sum(outlier_T.float(), lengths_B) > 0).float()
        kept_T = kept_T * expand_to_tokens(1 - outlier_B, lengths_B)
        metrics_B["outlier_seq_masked_ratio"] = outlier_B
    low, high = rules.token_mask_is_threshold_low, rules.token_mask_is_threshold_high
    if low is not None and high is not None:
        inside_T = _between(ratio_T, low, high).float()
        kept_T = kept_T * inside_T
        metrics_T["token_mask_ratio"] = 1 - inside_T
    total_B, count_B = sequence_sum(log_T * kept_T, lengths_B), sequence_sum(kept_T, lengths_B)
    weights_T = kept_T
    if rules.tis_ratio_type == "token":
        cap = rules.token_tis_ratio_clip_high
        weights_T = weights_T * ratio_T.clamp(max=cap)
        metrics_T["tis_token_clip_high_ratio"] = (ratio_T > cap).float()
    elif rules.tis_ratio_type == "sequence":
        cap, product_B = rules.sequence_tis_ratio_clip_high, total_B.clamp(-20, 20).exp()
        weights_T = weights_T * expand_to_tokens(product_B.clamp(max=cap), lengths_B)
        metrics_B["tis_seq_clip_high_ratio"] = (product_B > cap).float()
    if rules.sequence_mask_metric is not None:
        inside_B = _sequences_inside(total_B, count_B, rules).float()
        weights_T = weights_T * expand_to_tokens(inside_B, lengths_B)
        prefix = "geo" if rules.sequence_mask_metric == "geometric" else "product"
        metrics_B[f"{prefix}_sequence_mask_masked_ratio"] = 1 - inside_B
    return Correction(
        weights_T=weights_T,
        metrics_T=metrics_T,
        metrics_B=metrics_B,
        stats_T={"is_ratio": ratio_T},
    )


def active_mask_metrics(rules: OffPolicyCorrection) -> tuple[str, ...]:
    """The metrics of the masks and caps that are on: one that stays 0 never acts."""
    outliers = (rules.outlier_token_is_threshold_low, rules.outlier_token_is_threshold_high)
    token_mask = (rules.token_mask_is_threshold_low, rules.token_mask_is_threshold_high)
    active = {
        "tis_token_clip_high_ratio": rules.tis_ratio_type == "token",
        "tis_seq_clip_high_ratio": rules.tis_ratio_type == "sequence",
        "geo_sequence_mask_masked_ratio": rules.sequence_mask_metric == "geometric",
        "product_sequence_mask_masked_ratio": rules.sequence_mask_metric == "product",
        "outlier_seq_masked_ratio": outliers != (None, None),
        "token_mask_ratio": None not in token_mask,
    }
    return tuple(name for name, on in active.items() if on)


def _sequences_inside(total_B: Tensor, count_B: Tensor, rules: OffPolicyCorrection) -> Tensor:
    if rules.sequence_mask_metric == "geometric":
        mean_B = (total_B / count_B.clamp(min=1)).exp()
        return _between(mean_B, rules.geo_mask_low, rules.geo_mask_high)
    product_B = total_B.clamp(-20, 20).exp()
    return _between(product_B, rules.product_mask_low, rules.product_mask_high)


def _between(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """Bounds included; None is no bound."""
    low, high = -inf if low is None else low, inf if high is None else high
    return (values >= low) & (values <= high)
