"""The built-in advantage estimators, per group of attempts and per token of a batch.

Each estimator is a function and, below it, the `AdvantageEstimator` object with its facts. To add
one, write both and name the object in `skyfleet.config.algorithm.ADVANTAGE_ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from skyfleet.algorithms.estimator import (
    ESTIMATOR_KEY,
    AdvantageEstimator,
    BatchEstimator,
    find_equal_rewards_filter,
)
from skyfleet.algorithms.sample import Sample
from skyfleet.config.root import RunConfig

Floats = NDArray[np.float64]


def grpo(rewards: Sequence[float], *, norm_by_std: bool = True) -> list[float]:
    """Normalize advantages by the group: (reward - mean) / sample deviation (arXiv 2402.03300).

    `grpo([1, 0, 0, 0])` is about `[1.5, -0.5, -0.5, -0.5]`. Without the division it is the
    advantage of Dr. GRPO (arXiv 2503.20783).
    """
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = stdev(rewards) + 1e-6 if norm_by_std else 1.0
    return [(reward - mean) / scale for reward in rewards]


def _warn_of_scaled_penalties(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    scaled = algorithm.grpo_norm_by_std and algorithm.use_kl_in_reward
    if scaled and not find_equal_rewards_filter(config):
        yield (
            "trainer.algorithm.use_kl_in_reward=true with grpo_norm_by_std=true: in a group whose "
            "attempts all earned the same reward, the KL penalties are divided by their own "
            "standard deviation, however small; set trainer.algorithm.zero_variance_filter=true or "
            "grpo_norm_by_std=false"
        )


GRPO = AdvantageEstimator(
    name="grpo",
    scope="group",
    build=lambda algorithm: partial(grpo, norm_by_std=algorithm.grpo_norm_by_std),
    reads=("algorithm.grpo_norm_by_std",),
    centred="group",
    unit_deviation=lambda algorithm: algorithm.grpo_norm_by_std,
    warnings=_warn_of_scaled_penalties,
)


def rloo(rewards: Sequence[float]) -> list[float]:
    """The reward minus the mean reward of the other attempts (arXiv 2402.14740).

    `rloo([1, 0, 0])` is `[1.0, -0.5, -0.5]`.
    """
    n, total = len(rewards), sum(rewards)
    if n < 2:
        return [0.0] * n
    return [reward - (total - reward) / (n - 1) for reward in rewards]


RLOO = AdvantageEstimator(name="rloo", scope="group", build=lambda _: rloo, centred="group")


def maxrl(rewards: Sequence[float]) -> list[float]:
    """(reward - group mean) / group mean, so that rare successes count most (arXiv 2602.02710).

    `maxrl([1, 0, 0, 0])` is about `[3, -1, -1, -1]`. It is defined for non-negative rewards: with a
    mean of 0 or less every advantage is 0.
    """
    mean = fmean(rewards) if rewards else 0.0
    if len(rewards) < 2 or mean <= 0:
        return [0.0] * len(rewards)
    return [(reward - mean) / (mean + 1e-6) for reward in rewards]


def _check_positive_rewards(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    is_penalized = algorithm.overlong_buffer_len is not None
    if algorithm.use_kl_in_reward or is_penalized:
        cause = "overlong_buffer_len" if is_penalized else "use_kl_in_reward"
        yield (
            f"{ESTIMATOR_KEY}=maxrl divides by a group's mean reward, which trainer.algorithm.{cause} can "
            "push to 0 and below; unset that or use grpo"
        )


MAXRL = AdvantageEstimator(
    name="maxrl",
    scope="group",
    build=lambda _: maxrl,
    centred="group",
    errors=_check_positive_rewards,
)


def reinforce_plus_plus(samples: Sequence[Sample], *, gamma: float) -> list[Sample]:
    """Discounted returns, whitened over all action tokens of the batch (arXiv 2501.03262).

    The reward is on the last action token, KL penalties are on the tokens that caused them.
    """
    returns = [discount(_token_rewards(sample), gamma=gamma) for sample in samples]
    return _with_advantages(samples, whiten([r for row in returns for r in row]))


REINFORCE_PLUS_PLUS = AdvantageEstimator(
    name="reinforce++",
    scope="batch",
    build=lambda algorithm: BatchEstimator(
        credit=partial(reinforce_plus_plus, gamma=algorithm.gamma)
    ),
    reads=("algorithm.gamma",),
    centred="batch",
)


def generalized_advantage(samples: Sequence[Sample], *, gamma: float, lambd: float) -> list[Sample]:
    """GAE over each sample's action tokens, whitened over those of the batch (arXiv 1506.02438).

    Returns, the critic's targets, are those before whitening. Samples without values come back
    unchanged: the learner holds the critic and calls this again after computing the values.
    """
    if not all(sample.values for sample in samples):
        return list(samples)
    rows = [
        gae(_token_rewards(s), s.select_action_tokens(s.values), gamma=gamma, lambd=lambd)
        for s in samples
    ]
    with_returns = [
        replace(s, returns=s.scatter_to_tokens(returns))
        for s, (_, returns) in zip(samples, rows, strict=True)
    ]
    return _with_advantages(with_returns, whiten([a for advantages, _ in rows for a in advantages]))


GAE = AdvantageEstimator(
    name="gae",
    scope="batch",
    build=lambda algorithm: BatchEstimator(
        credit=partial(generalized_advantage, gamma=algorithm.gamma, lambd=algorithm.lambd)
    ),
    reads=(
        *("algorithm.gamma", "algorithm.lambd", "algorithm.value_clip"),
        *("critic.optimizer_config", "critic_mini_batch_size"),
    ),
    needs_critic=True,
    centred="batch",
)


def distillation(samples: Sequence[Sample]) -> list[Sample]:
    """On-policy distillation: a token's advantage is the teacher's logprob minus the policy's.

    The penalty is the policy's logprob minus the teacher's (KL in reward, k1); rewards are not
    used. https://thinkingmachines.ai/blog/on-policy-distillation
    """
    return [replace(s, advantages=tuple(-p for p in s.penalties) or s.advantages) for s in samples]


def _check_teacher(config: RunConfig) -> Iterator[str]:
    trainer, algorithm = config.trainer, config.trainer.algorithm
    path = trainer.ref.model.path
    if not algorithm.use_kl_in_reward or algorithm.kl_estimator_type != "k1":
        yield (
            f"{ESTIMATOR_KEY}=distillation learns from the KL to trainer.ref.model.path, token by token; set "
            "trainer.algorithm.use_kl_loss=false, use_kl_in_reward=true, kl_estimator_type=k1 and "
            "kl_loss_coef=1"
        )
    if algorithm.kl_ctrl.type == "adaptive":
        yield (
            f"trainer.algorithm.kl_ctrl.type=adaptive would make {ESTIMATOR_KEY}=distillation learn more "
            "slowly the nearer the policy is to its teacher; set it to fixed"
        )
    if path == trainer.policy.model.path:
        yield (
            f"{ESTIMATOR_KEY}=distillation learns from another model, but trainer.ref.model.path={path!r} is "
            "the initial policy; set it to the teacher"
        )
    if dropping := find_equal_rewards_filter(config):
        yield (
            f"{dropping} drops groups by their rewards, which {ESTIMATOR_KEY}=distillation does not use; "
            "unset it"
        )


DISTILLATION = AdvantageEstimator(
    name="distillation",
    scope="batch",
    build=lambda _: BatchEstimator(credit=distillation),
    needs_teacher=True,
    errors=_check_teacher,
)


def discount(rewards_T: Sequence[float], *, gamma: float) -> list[float]:
    """Discounted sum of each reward and those after it: `discount([0, 1], gamma=0.5)` is
    `[0.5, 1.0]`."""
    return list(accumulate(reversed(rewards_T), lambda after, now: now + gamma * after))[::-1]


def gae(
    rewards_T: Sequence[float], values_T: Sequence[float], *, gamma: float, lambd: float
) -> tuple[list[float], list[float]]:
    """Advantages and the critic's targets (arXiv 1506.02438).

    The sequence holds action tokens only: an observation is no action, so neither the discount nor
    the recursion runs over it.
    """
    next_values = [*values_T[1:], 0.0]
    td_errors = [
        reward + gamma * after - value
        for reward, value, after in zip(rewards_T, values_T, next_values, strict=True)
    ]
    advantages = discount(td_errors, gamma=gamma * lambd)
    returns = [a + value for a, value in zip(advantages, values_T, strict=True)]
    return advantages, returns


def whiten(values_N: Sequence[float]) -> Floats:
    """Normalize advantages: mean 0, sample deviation 1 over all values; fewer than two become 0."""
    values = np.asarray(values_N, np.float64)
    if len(values) < 2:
        return np.zeros_like(values)
    whitened: Floats = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    return whitened


def standardize(values_N: Sequence[float]) -> Floats:
    """Mean 0 and population deviation 1 over all values (`advantage_batch_normalize`)."""
    values = np.asarray(values_N, np.float64)
    if not len(values):
        return values
    standardized: Floats = (values - values.mean()) / np.sqrt(max(values.var(), 1e-8))
    return standardized


def normalize_batch(samples: Sequence[Sample]) -> list[Sample]:
    """Standardize the advantages over the action tokens of the batch."""
    advantages = [a for sample in samples for a in sample.select_action_tokens(sample.advantages)]
    return _with_advantages(samples, standardize(advantages))


def split_turns(samples: Sequence[Sample]) -> list[Sample]:
    """One sample per turn: everything before it, and advantages on the turn's own tokens only."""
    return [turn for sample in samples for turn in _turns(sample)]


def _turns(sample: Sample) -> Iterator[Sample]:
    for turn, (begin, end) in enumerate(sample.action_spans):

        def of_turn(
            values: tuple[float, ...], begin: int = begin, end: int = end
        ) -> tuple[float, ...]:
            return (0.0,) * begin + values[begin:end] if values else ()

        yield replace(
            sample,
            token_ids=sample.token_ids[:end],
            loss_mask=(False,) * begin + (True,) * (end - begin),
            logprobs=of_turn(sample.logprobs),
            old_logprobs=of_turn(sample.old_logprobs),
            advantages=of_turn(sample.advantages),
            penalties=of_turn(sample.penalties),
            step_rewards=sample.step_rewards[turn : turn + 1],
        )


def _token_rewards(sample: Sample) -> list[float]:
    """Per action token: minus its penalty, and the reward on the last."""
    penalties = (
        sample.select_action_tokens(sample.penalties)
        if sample.penalties
        else [0.0] * sample.n_action_tokens
    )
    rewards = [-penalty for penalty in penalties]
    rewards[-1] += sample.group_rewards[sample.attempt]
    return rewards


def _with_advantages(samples: Sequence[Sample], values_N: Floats) -> list[Sample]:
    """`values_N` holds one advantage per action token, sample after sample."""
    ends = np.cumsum([sample.n_action_tokens for sample in samples])
    rows = np.split(values_N, ends[:-1]) if samples else []
    return [
        replace(sample, advantages=sample.scatter_to_tokens(row.tolist()))
        for sample, row in zip(samples, rows, strict=True)
    ]
