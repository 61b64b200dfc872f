"""The critic fits returns with its own weights, and resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch
from tests.fakes.samples import random_groups
from tests.fakes.small_models import logprobs_of, small_decoder
from tests.learner.test_single_device_learner import SETTINGS, learner, on_policy

from skyfleet.algorithms.advantages import generalized_advantage
from skyfleet.algorithms.kl import RewardKl, fixed_control, k1
from skyfleet.algorithms.sample import Sample
from skyfleet.learner.critic import Critic, CriticSettings
from skyfleet.learner.optimizer import OptimizerSettings

CRITIC = CriticSettings(
    optimizer=OptimizerSettings(lr=3e-3),
    value_clip=None,
    compute_advantages=partial(generalized_advantage, gamma=1.0, lambd=1.0),
    critic_mini_batch_size=100,
    max_tokens_per_microbatch=10_000,
)


def critic(settings: CriticSettings = CRITIC, *, seed: int = 3, tied: bool = True) -> Critic:
    return Critic(partial(small_decoder, seed=seed, tie_word_embeddings=tied), settings)


def earned(n_groups: int = 2) -> list[Sample]:
    """Attempts of four a task, one of which earned something."""
    return [
        replace(s, attempt=i % 4, group_rewards=(1.0, 0.0, 0.0, 0.0))
        for i, s in enumerate(random_groups(n_groups))
    ]


def learned(judge: Critic, samples: list[Sample]) -> dict[str, float]:
    return judge.learn(judge.value(samples))[1]


def test_a_new_critic_predicts_zero_so_its_first_loss_is_that_of_the_returns() -> None:
    samples = earned()
    judge = critic()
    valued = judge.value(samples)
    assert all(s.values == (0.0,) * len(s.token_ids) for s in valued)
    _, metrics = judge.learn(valued)
    # Half of the squared return, which is 1 for a quarter of the attempts.
    assert metrics["critic/critic_loss"] == pytest.approx(0.125)
    assert metrics["critic/values_mean"] == 0.0
    assert metrics["critic/critic_lr"] == 3e-3
    assert metrics["critic/grad_norm"] > 0


@pytest.mark.parametrize("tied", [True, False])
def test_on_one_batch_the_loss_falls_and_values_approach_the_returns(tied: bool) -> None:
    samples, judge = earned(), critic(tied=tied)
    losses = [learned(judge, samples)["critic/critic_loss"] for _ in range(30)]
    assert losses[-1] < losses[0] / 4
    valued = judge.value(samples)
    rewarded = [max(s.values[-1], 0.0) for s in valued if s.attempt == 0]
    others = [s.values[-1] for s in valued if s.attempt]
    assert min(rewarded) > max(others)


def test_a_value_depends_only_on_the_tokens_before_its_own() -> None:
    """Else a critic would know the token it is to be surprised by."""
    judge, (first, *_) = critic(), earned()
    learned(judge, [first])
    last = len(first.token_ids) - 1
    assert first.loss_mask[last]
    changed = replace(first, token_ids=(*first.token_ids[:last], 63 - first.token_ids[last]))
    one, other = judge.value([first])[0], judge.value([changed])[0]
    assert one.values[last] == pytest.approx(other.values[last], abs=1e-6)
    assert one.values[last] != 0.0


@pytest.mark.parametrize("max_tokens", [1, 60, 150])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_critic_update_does_not_depend_on_the_micro_batches(
    max_tokens: int, recompute: bool
) -> None:
    samples = earned(3)
    reports = []
    cut_settings = replace(
        CRITIC, max_tokens_per_microbatch=max_tokens, gradient_checkpointing=recompute
    )
    for settings in (CRITIC, cut_settings):
        judge = critic(replace(settings, value_clip=0.2))
        reports.append([learned(judge, samples) for _ in range(2)])
    for whole, cut in zip(*reports, strict=True):
        assert cut == pytest.approx(whole, abs=1e-6, rel=1e-4)


def test_a_step_is_one_update_per_mini_batch_and_epoch() -> None:
    settings = replace(CRITIC, value_clip=0.2, critic_mini_batch_size=1, update_epochs_per_batch=3)
    rates: list[int] = []

    def counted(step: int) -> float:
        rates.append(step)
        return 1.0

    settings = replace(settings, optimizer=OptimizerSettings(lr=1e-3, schedule=counted))
    metrics = learned(critic(settings), earned(4))
    assert max(rates) == 11
    assert 0.0 <= metrics["critic/values_clipfrac"] <= 1.0


def test_a_loaded_critic_continues_bit_for_bit(tmp_path: Path) -> None:
    samples = earned()
    straight, resumed = critic(), critic(seed=9)
    for _ in range(2):
        learned(straight, samples)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    reports = [[learned(judge, samples) for _ in range(3)] for judge in (straight, resumed)]
    assert reports[0] == reports[1]


def test_a_critic_before_its_first_step_saves_nothing(tmp_path: Path) -> None:
    critic().save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    judge = critic()
    judge.load(tmp_path)
    assert judge.value(earned()) == critic().value(earned())


async def test_the_policy_learns_from_the_critics_advantages_and_not_from_those_it_got() -> None:
    samples = earned()
    decoder, judge = small_decoder(), critic()
    student = learner(decoder, SETTINGS, critic=judge)
    before = [p.clone() for p in decoder.module.parameters()]
    given = [replace(s, advantages=(0.0,) * len(s.advantages)) for s in samples]
    report = await student.step(given)
    assert any(
        not torch.equal(p, b) for p, b in zip(decoder.module.parameters(), before, strict=True)
    )
    assert report.metrics["loss/avg_raw_advantages"] == pytest.approx(0.0, abs=1e-9)
    assert report.metrics["loss/avg_raw_advantages_abs"] > 0.1
    assert report.metrics["critic/critic_loss"] == pytest.approx(0.125)


async def test_with_a_critic_advantages_are_computed_once() -> None:
    calls: list[int] = []

    def counted(samples: Sequence[Sample]) -> list[Sample]:
        calls.append(len(samples))
        return CRITIC.compute_advantages(samples)

    rules = RewardKl(estimate=k1, coef=0.5, control=fixed_control, compute_advantages=counted)
    student = learner(
        small_decoder(),
        replace(SETTINGS, reward_kl=rules),
        make_reference=lambda: small_decoder(seed=2),
        critic=critic(replace(CRITIC, compute_advantages=counted)),
    )
    await student.step(earned())
    assert calls == [8]


async def test_a_kl_penalty_lowers_the_critics_targets() -> None:
    judge, samples = critic(), on_policy(small_decoder(), earned())
    rules = RewardKl(
        estimate=k1, coef=0.5, control=fixed_control, compute_advantages=CRITIC.compute_advantages
    )
    student = learner(
        small_decoder(),
        replace(SETTINGS, reward_kl=rules),
        make_reference=lambda: small_decoder(seed=2),
        critic=judge,
    )
    losses = []
    for s in samples:
        ref_T = logprobs_of(
            small_decoder(seed=2), s.token_ids, len(s.token_ids) - 1, temperature=0.9
        )
        costs = s.select_action_tokens([0.0, *(torch.tensor(s.logprobs[1:]) - ref_T).tolist()])
        earned_here = s.group_rewards[s.attempt]
        returns = [earned_here - 0.5 * sum(costs[at:]) for at in range(len(costs))]
        losses.append(fmean(r * r / 2 for r in returns))
    report = await student.step(samples)
    assert report.metrics["critic/critic_loss"] == pytest.approx(fmean(losses), rel=1e-4)
    assert fmean(losses) > 0.2  # without the KL it is 0.125
