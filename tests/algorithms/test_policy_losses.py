"""Every policy loss on numbers worked by hand, and where SkyRL's numbers differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import exp, log
from typing import Any

import pytest
import torch
from tests.algorithms.test_losses import inputs

from skyfleet.algorithms.losses.covariance import (
    clip_cov,
    covariances,
    kl_cov,
    select_clip_cov,
    select_kl_cov,
)
from skyfleet.algorithms.losses.loss import LossInputs, LossOutput
from skyfleet.algorithms.losses.policy_gradient import (
    cispo,
    dppo,
    importance_sampling,
    rollout_is,
    sapo,
)
from skyfleet.algorithms.losses.ppo import dual_clip, gspo, ppo_clip
from skyfleet.algorithms.registry import build_policy_loss, build_selector
from skyfleet.config.algorithm import POLICY_LOSSES, Algorithm

CLIP: dict[str, Any] = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}


def gradients(given: LossInputs, output: LossOutput) -> list[float]:
    output.loss_T.sum().backward()
    assert given.logprobs_T.grad is not None
    values: list[float] = given.logprobs_T.grad.tolist()
    return values


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    given = inputs([10.0, 2.0, 10.0], [-1.0, -1.0, 1.0])
    output = dual_clip(given, **CLIP, clip_ratio_c=3.0)
    assert output.loss_T.tolist() == pytest.approx([3.0, 2.0, -1.2])
    assert gradients(given, output) == pytest.approx([0.0, 2.0, 0.0])


def test_gspo_has_one_ratio_per_sequence_and_one_gradient_per_token() -> None:
    given = replace(
        inputs([1.1, 1.21, 0.5, 0.5], [1.0, 1.0, 1.0, -1.0]), lengths_B=torch.tensor([2, 2])
    )
    output = gspo(given, **CLIP)
    # Geometric means 1.1^1.5 and 0.5; the second sequence is clipped only where A < 0.
    mean = 1.1**1.5
    assert output.loss_T.tolist() == pytest.approx([-mean, -mean, -0.5, 0.8], abs=1e-5)
    assert output.metrics_T["ppo_clip_ratio"].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert gradients(given, output) == pytest.approx([-mean, -mean, -0.5, 0.0], abs=1e-5)


def test_cispo_clamps_the_weight_and_keeps_every_gradient() -> None:
    given = inputs([8.0, 0.5], [1.0, -2.0])
    output = cispo(given, cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0, cispo_anchor="old")
    # -A clamp(r) logp: weights 5 and 1/2; older SkyRL's bounds would have made the second 1.
    assert output.loss_T.tolist() == pytest.approx([-5 * (log(8) - 1), log(0.5) - 1], abs=1e-5)
    assert output.metrics_T["ppo_clip_ratio"].tolist() == [1.0, 0.0]
    assert output.stats_T["cispo_ratio"].tolist() == pytest.approx([8.0, 0.5], abs=1e-5)
    assert gradients(given, output) == pytest.approx([-5.0, 1.0])


def test_cispo_may_be_anchored_to_the_engines_logprobs() -> None:
    given = replace(inputs([2.0], [1.0]), behaviour_logprobs_T=torch.tensor([log(2) - 1.0]))
    output = cispo(given, cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0, cispo_anchor="rollout")
    assert gradients(given, output) == pytest.approx([-1.0])


def test_sapo_gates_by_the_ratio() -> None:
    given = inputs([1.0, 2.0, 2.0], [1.0, 1.0, -1.0])
    output = sapo(given, tau_pos=1.0, tau_neg=2.0)
    # sigmoid(0), sigmoid(1) and sigmoid(2) are 0.5, 0.731059 and 0.880797.
    assert output.loss_T.tolist() == pytest.approx([-2.0, -2.924234, 1.761594], abs=1e-5)
    # Where the ratio is 1 the gradient is the advantage: 4 x 1/4.
    assert gradients(given, output)[0] == pytest.approx(-1.0)


def probabilities(sampled: list[float], now: list[float], advantages: list[float]) -> LossInputs:
    behaviour = torch.tensor(sampled).log()
    return replace(
        inputs([1.0] * len(now), advantages),
        logprobs_T=torch.tensor(now).log().requires_grad_(),
        behaviour_logprobs_T=behaviour,
    )


def test_dppo_drops_a_token_whose_probability_moved_beyond_delta() -> None:
    given = probabilities(
        [0.5, 0.5, 0.5, 0.5, 0.01], [0.8, 0.8, 0.2, 0.6, 0.1], [1.0, -1.0, -1.0, 1.0, 1.0]
    )
    output = dppo(given, dppo_type="binary_tv", delta_low=0.2, delta_high=0.2)
    # A ratio of ten in the last is a move of 0.09 and stays.
    assert output.loss_T.tolist() == pytest.approx([0.0, 1.6, 0.0, -1.2, -10.0], abs=1e-5)
    assert output.metrics_T["ppo_clip_ratio"].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_dppo_can_use_the_binary_kl() -> None:
    # KL of (1/2, 1/2) from (0.8, 0.2): (log(5/8) + log(5/2)) / 2 = 0.223144.
    given = probabilities([0.5, 0.5, 0.5], [0.8, 0.8, 0.2], [1.0, 1.0, 1.0])
    kept = dppo(given, dppo_type="binary_kl", delta_low=0.2, delta_high=0.2232)
    assert kept.metrics_T["ppo_clip_ratio"].tolist() == [0.0, 0.0, 0.0]
    dropped = dppo(given, dppo_type="binary_kl", delta_low=0.2, delta_high=0.2231)
    # The last moved as far, but back to where it should be likelier.
    assert dropped.metrics_T["ppo_clip_ratio"].tolist() == [1.0, 1.0, 0.0]


def test_rollout_is_masks_tokens_outside_the_bounds_and_weights_the_others() -> None:
    given = replace(inputs([1.1, 1.3, 0.7], [1.0, 1.0, -1.0]), old_logprobs_T=torch.zeros(3))
    output = rollout_is(given, **CLIP)
    assert output.loss_T.tolist() == pytest.approx([-1.1 * (log(1.1) - 1), 0.0, 0.0], abs=1e-5)
    assert output.metrics_T["ppo_clip_ratio"].tolist() == [0.0, 1.0, 1.0]
    assert gradients(given, output) == pytest.approx([-1.1, 0.0, 0.0], abs=1e-5)


def test_importance_sampling_is_the_ratio_times_the_advantage() -> None:
    given = inputs([3.0, 0.1], [1.0, -2.0])
    output = importance_sampling(given)
    assert output.loss_T.tolist() == pytest.approx([-3.0, 0.2], abs=1e-5)
    assert output.metrics_T["importance_ratio"].tolist() == pytest.approx([3.0, 0.1])
    assert gradients(given, output) == pytest.approx([-3.0, 0.2], abs=1e-5)


def comparing() -> LossInputs:
    """Logprobs -1, -3, -1, -3 and advantages 2, -2, -2, 2: covariances 2, 2, -2, -2."""
    return LossInputs(
        tokens_T=torch.arange(4),
        logprobs_T=torch.tensor([-1.0, -3.0, -1.0, -3.0], requires_grad=True),
        old_logprobs_T=torch.tensor([-1.0, -3.0, -1.0, -3.0]),
        behaviour_logprobs_T=torch.zeros(4),
        advantages_T=torch.tensor([2.0, -2.0, -2.0, 2.0]),
        lengths_B=torch.tensor([4]),
    )


def test_clip_cov_masks_some_of_the_tokens_between_its_bounds() -> None:
    given = comparing()
    assert covariances(given).tolist() == [2.0, 2.0, -2.0, -2.0]
    select = partial(select_clip_cov, given, clip_cov_lb=1.0, clip_cov_ub=5.0, **CLIP)
    assert select(clip_ratio=0.5).tolist() == [True, True, False, False]
    one = select(clip_ratio=0.0002)
    assert one.sum() == 1
    assert one.tolist() == select(clip_ratio=0.0002).tolist()
    output = clip_cov(replace(given, selected_T=torch.tensor([True, False, False, False])), **CLIP)
    assert output.loss_T.tolist() == pytest.approx([0.0, 2.0, 2.0, -2.0])
    assert output.metrics_T["clip_cov_ratio"].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_clip_cov_is_seeded_by_the_token_ids() -> None:
    def drawn(first_token: int, *, rounding: float = 0.0, fewer: int = 0) -> list[int]:
        logprobs_T = torch.tensor([-1.0, -3.0] * 50) + rounding
        given = LossInputs(
            tokens_T=torch.arange(first_token, first_token + 100),
            logprobs_T=logprobs_T,
            old_logprobs_T=logprobs_T,
            behaviour_logprobs_T=logprobs_T,
            advantages_T=torch.tensor([0.0] * fewer + [2.0, -2.0] * 50)[:100],
            lengths_B=torch.tensor([100]),
        )
        selected = select_clip_cov(given, clip_ratio=0.1, clip_cov_lb=1, clip_cov_ub=5, **CLIP)
        return selected.nonzero().squeeze(1).tolist()

    assert drawn(1) == drawn(1, rounding=1e-6)
    assert drawn(1) != drawn(2)
    # Two tokens less to draw from: at most two others are drawn in their place.
    assert len({*drawn(1)} - {*drawn(1, fewer=2)}) <= 2


def test_clip_cov_does_not_select_tokens_that_ppo_clips() -> None:
    moved = replace(comparing(), old_logprobs_T=torch.tensor([-2.0, -3.0, -1.0, -3.0]))
    selected = select_clip_cov(moved, clip_ratio=0.5, clip_cov_lb=1.0, clip_cov_ub=5.0, **CLIP)
    assert selected.tolist() == [False, True, False, False]


def test_kl_cov_penalizes_the_tokens_of_highest_covariance() -> None:
    given = replace(comparing(), old_logprobs_T=torch.tensor([-1.5, -3.0, -1.0, -3.0]))
    selected = select_kl_cov(given, kl_cov_frac=0.5)
    assert selected.tolist() == [True, True, False, False]
    output = kl_cov(replace(given, selected_T=selected), ppo_kl_coef=0.1)
    # -rA, and 0.1 x 0.5 on the one that moved.
    expected = [-2 * exp(0.5) + 0.05, 2.0, 2.0, -2.0]
    assert output.loss_T.tolist() == pytest.approx(expected, abs=1e-5)


def test_kl_cov_ignores_rounding_differences() -> None:
    """The gradient of |x| is a sign; with one update per batch it would be that of noise."""
    still = comparing()
    noise_T = torch.tensor([1e-7, -2e-7, 1e-7, 2e-7])
    given = replace(
        still, old_logprobs_T=still.old_logprobs_T + noise_T, selected_T=torch.ones(4).bool()
    )
    output = kl_cov(given, ppo_kl_coef=1.0)
    assert output.loss_T.tolist() == pytest.approx([-2.0, 2.0, 2.0, -2.0])
    assert gradients(given, output) == pytest.approx([-2.0, 2.0, 2.0, -2.0])


def test_the_penalty_of_kl_cov_has_the_weight_of_its_token() -> None:
    """SkyRL adds it unscaled to a mean, where it dominates the loss."""
    given = replace(
        comparing(),
        old_logprobs_T=torch.tensor([-1.5, -3.0, -1.0, -3.0]),
        selected_T=torch.tensor([True, False, False, False]),
    )
    plain = kl_cov(given, ppo_kl_coef=0.0).loss_T.mean()
    held = kl_cov(given, ppo_kl_coef=0.1).loss_T.mean()
    assert (held - plain).item() == pytest.approx(0.05 / 4)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_name_of_a_loss_in_the_configuration_can_be_built(name: str) -> None:
    algorithm = Algorithm(policy_loss_type=name)
    given, select = inputs([1.0, 1.1], [1.0, -1.0]), build_selector(algorithm)
    assert (select is not None) == name.endswith("_cov")
    if select:
        given = replace(given, selected_T=select(given))
    assert build_policy_loss(algorithm)(given).loss_T.shape == (2,)


def test_a_loss_gets_its_settings() -> None:
    wide = Algorithm(eps_clip_low=0.5, eps_clip_high=0.6)
    given = inputs([9.0], [1.0])
    assert build_policy_loss(wide)(given).loss_T.tolist() == pytest.approx([-1.6])


def test_every_clipped_loss_is_finite_for_extreme_ratios() -> None:
    given = replace(inputs([1.0], [-1.0]), old_logprobs_T=torch.tensor([-200.0]))
    for loss in (
        partial(ppo_clip, **CLIP),
        partial(gspo, **CLIP),
        partial(sapo, tau_pos=1.0, tau_neg=1.0),
    ):
        assert loss(given).loss_T.isfinite().all()
