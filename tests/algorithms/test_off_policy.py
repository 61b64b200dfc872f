"""Off-policy correction weights or masks tokens and sequences."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch

from skyfleet.algorithms.losses.loss import LossInputs
from skyfleet.algorithms.losses.off_policy import Correction, correct, with_correction
from skyfleet.algorithms.losses.policy_gradient import importance_sampling
from skyfleet.config.algorithm import OffPolicyCorrection

RATIOS = [[4.0, 0.5], [1.1, 1.0, 0.9]]
"""Learner over engine, in two sequences: products 2 and 0.99."""


def given() -> LossInputs:
    flat = [ratio for row in RATIOS for ratio in row]
    return LossInputs(
        tokens_T=torch.arange(5),
        logprobs_T=torch.full((5,), -1.0, requires_grad=True),
        old_logprobs_T=torch.full((5,), -1.0),
        behaviour_logprobs_T=torch.tensor([-1.0 - log(ratio) for ratio in flat]),
        advantages_T=torch.ones(5),
        lengths_B=torch.tensor([2, 3]),
    )


def corrected(**rules: Any) -> Correction:
    return correct(given(), OffPolicyCorrection(**rules))


def weights(**rules: Any) -> list[float]:
    values: list[float] = corrected(**rules).weights_T.tolist()
    return values


def test_without_a_rule_the_loss_is_unchanged() -> None:
    assert with_correction(importance_sampling, OffPolicyCorrection()) is importance_sampling


def test_token_tis_weights_a_token_by_its_capped_ratio() -> None:
    assert weights(tis_ratio_type="token") == pytest.approx([2.0, 0.5, 1.1, 1.0, 0.9], abs=1e-5)
    correction = corrected(tis_ratio_type="token")
    assert correction.metrics_T["tis_token_clip_high_ratio"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert correction.stats_T["is_ratio"].tolist() == pytest.approx(
        [4.0, 0.5, 1.1, 1.0, 0.9], abs=1e-5
    )


def test_sequence_tis_weights_a_sequence_by_its_capped_product() -> None:
    rules = {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5}
    assert weights(**rules) == pytest.approx([1.5, 1.5, 0.99, 0.99, 0.99], abs=1e-5)
    assert corrected(**rules).metrics_B["tis_seq_clip_high_ratio"].tolist() == [1.0, 0.0]


def test_a_sequence_is_masked_by_its_geometric_mean_or_its_product() -> None:
    # Geometric means 2^(1/2) and 0.99^(1/3) = 0.99666.
    assert weights(sequence_mask_metric="geometric") == [0.0, 0.0, 1.0, 1.0, 1.0]
    narrow = {"sequence_mask_metric": "geometric", "geo_mask_low": 0.997}
    assert weights(**narrow) == [0.0] * 5
    product = {"sequence_mask_metric": "product", "product_mask_high": 1.9}
    assert weights(**product) == [0.0, 0.0, 1.0, 1.0, 1.0]
    masked = corrected(**product).metrics_B["product_sequence_mask_masked_ratio"]
    assert masked.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"outlier_token_is_threshold_high": 3.0}, [0.0, 1.0]),
        ({"outlier_token_is_threshold_low": 0.6}, [0.0, 1.0]),
        ({"outlier_token_is_threshold_low": 0.95}, [0.0, 0.0]),
        ({"outlier_token_is_threshold_low": 0.1}, [1.0, 1.0]),
    ],
)
def test_one_outlier_token_masks_its_sequence(rules: dict[str, float], kept: list[float]) -> None:
    assert weights(**rules) == [kept[0]] * 2 + [kept[1]] * 3
    masked = corrected(**rules).metrics_B["outlier_seq_masked_ratio"].tolist()
    assert masked == [1 - k for k in kept]


def test_a_token_mask_masks_single_tokens_and_later_rules_see_the_rest() -> None:
    rules = {"token_mask_is_threshold_low": 0.5 - 1e-6, "token_mask_is_threshold_high": 2.0}
    assert weights(**rules) == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert corrected(**rules).metrics_T["token_mask_ratio"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    # Without its first token, the first sequence's product is 1/2.
    both = {**rules, "tis_ratio_type": "sequence"}
    assert weights(**both) == pytest.approx([0.0, 0.5, 0.99, 0.99, 0.99], abs=1e-5)


def test_the_weights_multiply_the_loss_and_the_metrics_are_merged() -> None:
    loss = with_correction(importance_sampling, OffPolicyCorrection(tis_ratio_type="token"))
    output = loss(given())
    assert output.loss_T.tolist() == pytest.approx([-2.0, -0.5, -1.1, -1.0, -0.9], abs=1e-5)
    assert {"importance_ratio", "tis_token_clip_high_ratio"} == output.metrics_T.keys()
    assert {"is_ratio"} == output.stats_T.keys()
