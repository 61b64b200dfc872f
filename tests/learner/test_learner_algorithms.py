"""Every loss, KL in reward, distillation and entropy in the learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import log
from pathlib import Path
from statistics import pstdev

import pytest
import torch
from tests.fakes.samples import random_groups, sample
from tests.fakes.small_models import logits_of, small_decoder
from tests.learner.test_single_device_learner import SETTINGS, learner, on_policy, updated

from skyfleet.algorithms.advantages import distillation, grpo
from skyfleet.algorithms.credit_assignment import estimate_advantages
from skyfleet.algorithms.estimator import BatchEstimator
from skyfleet.algorithms.kl import RewardKl, adaptive_control, fixed_control, k1
from skyfleet.algorithms.losses.loss import LossInputs, LossOutput
from skyfleet.algorithms.losses.policy_gradient import importance_sampling
from skyfleet.algorithms.reduction import Reduction, prompt_mean, sequence_mean, token_mean
from skyfleet.algorithms.registry import build_policy_loss, build_selector
from skyfleet.algorithms.sample import Sample
from skyfleet.config.algorithm import POLICY_LOSSES, Algorithm, ClipCov, OffPolicyCorrection
from skyfleet.errors import ModelError
from skyfleet.learner.optimizer import OptimizerSettings


@pytest.mark.parametrize("name", POLICY_LOSSES)
async def test_no_loss_depends_on_the_micro_batches(name: str) -> None:
    samples = [
        replace(s, old_logprobs=own.logprobs)
        for s, own in zip(
            on_policy(small_decoder(seed=1), random_groups(3), off_by=0.1),
            on_policy(small_decoder(seed=1), random_groups(3), off_by=-0.2),
            strict=True,
        )
    ]
    algorithm = Algorithm(
        policy_loss_type=name,
        clip_cov=ClipCov(clip_ratio=0.1, clip_cov_lb=0.1, clip_cov_ub=50.0),
        off_policy_correction=OffPolicyCorrection()
        if name.endswith("_cov")
        else OffPolicyCorrection(tis_ratio_type="sequence", outlier_token_is_threshold_high=9.0),
    )
    settings = replace(
        SETTINGS,
        policy_loss=build_policy_loss(algorithm),
        select=build_selector(algorithm),
        reduce=prompt_mean,
        optimizer=OptimizerSettings(lr=1e-5),
    )
    whole = await updated(settings, samples, reference=False)
    cut = await updated(replace(settings, max_tokens_per_microbatch=40), samples, reference=False)
    for one, other in zip(cut[0], whole[0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert cut[2] == pytest.approx(whole[2], abs=1e-6, rel=1e-5)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
async def test_selected_tokens_do_not_depend_on_the_micro_batches(name: str) -> None:
    """What one step rounds otherwise, the next one samples with: it must decide nothing."""
    algorithm = Algorithm(
        policy_loss_type=name, clip_cov=ClipCov(clip_ratio=0.2, clip_cov_lb=0.1, clip_cov_ub=50.0)
    )

    async def weights(max_tokens: int) -> list[torch.Tensor]:
        decoder = small_decoder(seed=1)
        settings = replace(
            SETTINGS,
            policy_loss=build_policy_loss(algorithm),
            select=build_selector(algorithm),
            max_tokens_per_microbatch=max_tokens,
        )
        student = learner(decoder, settings)
        for _ in range(2):
            await student.step(on_policy(decoder, random_groups(3)))
        return [weight.detach().clone() for weight in decoder.module.parameters()]

    for one, other in zip(await weights(1), await weights(10_000), strict=True):
        # A step moves a weight by the rate, 1e-4; Adam makes noise of a gradient of nearly zero.
        assert (one - other).abs().mean() < 1e-6


@pytest.mark.parametrize("reduce", [token_mean, sequence_mean])
async def test_clip_cov_acts_with_every_reduction(reduce: Reduction) -> None:
    """SkyRL judges advantages that a token mean has made too small to pass any bound."""
    samples = on_policy(small_decoder(), random_groups(3))
    n_action_tokens = sum(s.n_action_tokens for s in samples)
    algorithm = Algorithm(policy_loss_type="clip_cov")
    settings = replace(
        SETTINGS,
        policy_loss=build_policy_loss(algorithm),
        select=build_selector(algorithm),
        reduce=reduce,
    )
    report = await learner(small_decoder(), settings).step(samples)
    assert report.metrics["policy/clip_cov_ratio"] == pytest.approx(1 / n_action_tokens)


async def test_kl_in_the_reward_recomputes_advantages_and_adapts_its_coefficient(
    tmp_path: Path,
) -> None:
    attempts = [
        replace(
            s, attempt=i, group_rewards=(1.0, 0.0, 0.0, 0.0), advantages=(0.0,) * len(s.token_ids)
        )
        for i, s in enumerate(random_groups(1))
    ]
    recomputed: list[Sample] = []

    def recompute(samples: Sequence[Sample]) -> list[Sample]:
        recomputed[:] = estimate_advantages(samples, grpo)
        return recomputed

    rules = RewardKl(
        estimate=k1,
        coef=0.5,
        control=partial(adaptive_control, kl_target=1e-3, horizon=8),
        compute_advantages=recompute,
    )
    decoder = small_decoder(seed=1)
    settings = replace(SETTINGS, reward_kl=rules, recompute_old_logprobs=True)
    reference = partial(small_decoder, seed=2)
    student = learner(decoder, settings, make_reference=reference)
    own, theirs = on_policy(decoder, attempts), on_policy(small_decoder(seed=2), attempts)
    first = (await student.step(attempts)).metrics
    penalties = [
        0.5 * (sum(mine.logprobs) - sum(other.logprobs))
        for mine, other in zip(own, theirs, strict=True)
    ]
    left = grpo([1.0 - penalties[0], *(-p for p in penalties[1:])])
    assert [s.select_action_tokens(s.advantages)[0] for s in recomputed] == pytest.approx(
        left, abs=1e-4
    )
    means = [p / 0.5 / s.n_action_tokens for p, s in zip(penalties, attempts, strict=True)]
    assert first["loss/avg_kl"] == pytest.approx(sum(means) / 4, abs=1e-4)
    assert first["loss/kl_loss_coef"] == 0.5
    student.save(tmp_path)
    resumed = learner(small_decoder(), settings, make_reference=reference)
    resumed.load(tmp_path)
    second = (await resumed.step(attempts)).metrics
    # The error is cut to a fifth, and four sequences are half the horizon.
    direction = 1 if first["loss/avg_kl"] > 0 else -1
    assert second["loss/kl_loss_coef"] == pytest.approx(0.5 * (1 + direction * 0.1))


async def test_distillation_moves_the_policy_towards_its_teacher() -> None:
    rules = RewardKl(
        estimate=k1,
        coef=1.0,
        control=fixed_control,
        compute_advantages=partial(
            estimate_advantages, estimator=BatchEstimator(credit=distillation)
        ),
    )
    settings = replace(
        SETTINGS,
        temperature=1.0,
        policy_loss=importance_sampling,
        reward_kl=rules,
        recompute_old_logprobs=True,
    )
    decoder, teacher = small_decoder(seed=1), small_decoder(seed=2)
    student = learner(decoder, settings, make_reference=lambda: teacher)

    def gap() -> float:
        """The whole KL of the next token after 3."""
        own, theirs = (logits_of(d, [3])[-1].log_softmax(-1) for d in (decoder, teacher))
        return float((own.exp() * (own - theirs)).sum().detach())

    before = gap()
    for _ in range(3):
        chances = logits_of(decoder, [3])[-1].detach().softmax(-1)
        draw = torch.Generator().manual_seed(0)
        tokens = torch.multinomial(chances, 200, replacement=True, generator=draw).tolist()
        await student.step([sample([3, token], [False, True], advantage=0.0) for token in tokens])
    assert gap() < 0.95 * before


@pytest.mark.parametrize("chunk_size", [1024, 5])
async def test_the_entropy_term_does_not_depend_on_the_micro_batches(chunk_size: int) -> None:
    """Its mean is over the mini-batch's tokens; SkyRL's is one mean a micro-batch."""
    flat = [replace(s, advantages=(0.0,) * len(s.token_ids)) for s in random_groups(3)]
    samples = on_policy(small_decoder(seed=1), flat)
    settings = replace(
        SETTINGS,
        entropy_loss_coef=0.5,
        loss_chunk_size=chunk_size,
        optimizer=OptimizerSettings(lr=1e-4),
    )
    whole = await updated(settings, samples, reference=False)
    cut = await updated(replace(settings, max_tokens_per_microbatch=40), samples, reference=False)
    for one, other in zip(cut[0], whole[0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    # Nothing else pulls: the loss is minus half the entropy.
    assert whole[2]["policy/final_loss"] == pytest.approx(-0.5 * whole[2]["policy/policy_entropy"])
    negative = await updated(replace(settings, entropy_loss_coef=-0.5), samples, reference=False)
    for one, other in zip(negative[0], whole[0], strict=True):
        assert torch.equal(one, -other)
    student = learner(small_decoder(seed=1), settings)
    entropies = [(await student.step(samples)).metrics["policy/policy_entropy"] for _ in range(3)]
    assert entropies[0] < entropies[1] < entropies[2]


@pytest.mark.parametrize("max_tokens", [1, 10_000])
async def test_the_extremes_of_a_loss_metric_are_over_the_whole_step(max_tokens: int) -> None:
    def with_stats(inputs: LossInputs) -> LossOutput:
        return LossOutput(loss_T=-inputs.logprobs_T, stats_T={"token": inputs.tokens_T})

    samples = random_groups(3)
    settings = replace(
        SETTINGS,
        policy_loss=with_stats,
        policy_mini_batch_size=1,
        max_tokens_per_microbatch=max_tokens,
    )
    metrics = (await learner(small_decoder(), settings).step(samples)).metrics
    tokens = [t for s in samples for t, own in zip(s.token_ids, s.loss_mask, strict=True) if own]
    assert metrics["policy/token_std"] == pytest.approx(pstdev(tokens))
    assert (metrics["policy/token_max"], metrics["policy/token_min"]) == (max(tokens), min(tokens))


@pytest.mark.parametrize(
    ("algorithm", "ratio"),
    [
        (Algorithm(policy_loss_type="cispo"), "cispo_ratio"),
        (
            Algorithm(off_policy_correction=OffPolicyCorrection(tis_ratio_type="token")),
            "is_ratio",
        ),
    ],
)
async def test_the_extremes_of_a_ratio_are_logged(algorithm: Algorithm, ratio: str) -> None:
    """Old logprobs are the learner's own but for one token; the engine's are off by it too."""
    first, *others = on_policy(small_decoder(), random_groups(2))
    at = first.loss_mask.index(True)
    doubled = (*first.logprobs[:at], first.logprobs[at] - log(2), *first.logprobs[at + 1 :])
    settings = replace(
        SETTINGS,
        policy_loss=build_policy_loss(algorithm),
        recompute_old_logprobs=ratio == "is_ratio",
    )
    report = await learner(small_decoder(), settings).step(
        [replace(first, logprobs=doubled), *others]
    )
    assert report.metrics[f"policy/{ratio}_max"] == pytest.approx(2.0, abs=1e-3)
    assert report.metrics[f"policy/{ratio}_min"] == pytest.approx(1.0, abs=1e-3)
    assert report.metrics[f"policy/{ratio}_std"] > 0


async def test_a_loss_without_a_gradient_is_refused() -> None:
    def detached(inputs: LossInputs) -> LossOutput:
        return LossOutput(loss_T=-inputs.logprobs_T.detach() * inputs.advantages_T, metrics_T={})

    settings = replace(SETTINGS, policy_loss=detached)
    with pytest.raises(ModelError, match="the policy loss does not require grad"):
        await learner(small_decoder(), settings).step(random_groups(2))
