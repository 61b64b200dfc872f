"""Advantage estimators: per group, per batch and per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyfleet.algorithms.sample import Sample
from skyfleet.config.algorithm import Algorithm
from skyfleet.config.imports import import_named, with_kwargs
from skyfleet.errors import ConfigError

GroupEstimator = Callable[[Sequence[float]], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimator:
    """An estimator that looks beyond one group: a batch's samples in, the same with credit out."""

    credit: Callable[[Sequence[Sample]], list[Sample]]


Estimator = GroupEstimator | BatchEstimator


def grpo(rewards: Sequence[float], *, norm_by_std: bool = True) -> list[float]:
    """How far each attempt lies above the group's mean, in sample deviations (arXiv 2402.03300).

    `grpo([1, 0, 0, 0])` is about `[1.5, -0.5, -0.5, -0.5]`. Without the deviation it is the
    advantage of Dr. GRPO (arXiv 2503.20783).
    """
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = stdev(rewards) + 1e-6 if norm_by_std else 1.0
    return [(reward - mean) / scale for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Each attempt against the mean of the others (arXiv 2402.14740).

    `rloo([1, 0, 0])` is `[1.0, -0.5, -0.5]`.
    """
    n, total = len(rewards), sum(rewards)
    if n < 2:
        return [0.0] * n
    return [reward - (total - reward) / (n - 1) for reward in rewards]


def maxrl(rewards: Sequence[float]) -> list[float]:
    """The distance from the mean, in means: rare successes count most (arXiv 2602.02710).

    `maxrl([1, 0, 0, 0])` is about `[3, -1, -1, -1]`. It is made for rewards from 0 up: a mean of 0
    or less is no measure, and gives zeros.
    """
    mean = fmean(rewards) if rewards else 0.0
    if len(rewards) < 2 or mean <= 0:
        return [0.0] * len(rewards)
    return [(reward - mean) / (mean + 1e-6) for reward in rewards]


Floats = NDArray[np.float64]


def discounted(rewards_T: Sequence[float], *, gamma: float) -> list[float]:
    """What follows each token, nearer rewards counting more. `discounted([0, 1], gamma=0.5)` is
    `[0.5, 1.0]`."""
    return list(accumulate(reversed(rewards_T), lambda after, now: now + gamma * after))[::-1]


def gae(
    rewards_T: Sequence[float], values_T: Sequence[float], *, gamma: float, lambd: float
) -> tuple[list[float], list[float]]:
    """Advantages and a critic's targets (arXiv 1506.02438).

    The sequence holds what the policy chose and nothing else: an observation is no action, so
    neither the discount nor the recursion runs over it.
    """
    following = [*values_T[1:], 0.0]
    surprises = [
        reward + gamma * after - value
        for reward, value, after in zip(rewards_T, values_T, following, strict=True)
    ]
    advantages = discounted(surprises, gamma=gamma * lambd)
    targets = [a + value for a, value in zip(advantages, values_T, strict=True)]
    return advantages, targets


def whitened(values_N: Sequence[float]) -> Floats:
    """Mean 0 and sample deviation 1 over all of them; fewer than two say nothing: zeros."""
    values = np.asarray(values_N, np.float64)
    if len(values) < 2:
        return np.zeros_like(values)
    whole: Floats = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    return whole


def standardized(values_N: Sequence[float]) -> Floats:
    """Mean 0 and population deviation 1 over all of them (`advantage_batch_normalize`)."""
    values = np.asarray(values_N, np.float64)
    if not len(values):
        return values
    whole: Floats = (values - values.mean()) / np.sqrt(max(values.var(), 1e-8))
    return whole


def reinforce_plus_plus(samples: Sequence[Sample], *, gamma: float) -> list[Sample]:
    """Discounted returns, whitened over all chosen tokens of the batch (arXiv 2501.03262).

    The reward stands on the last chosen token; penalties stand where they arose.
    """
    returns = [discounted(_token_rewards(sample), gamma=gamma) for sample in samples]
    return _with_advantages(samples, whitened([r for row in returns for r in row]))


def generalized_advantage(samples: Sequence[Sample], *, gamma: float, lambd: float) -> list[Sample]:
    """GAE over each sample's chosen tokens, whitened over those of the batch (arXiv 1506.02438).

    A critic's targets are told as they were before whitening. Samples that no critic has valued
    yet come back as they are: the learner holds the critic, and asks again.
    """
    if not all(sample.values for sample in samples):
        return list(samples)
    rows = [
        gae(_token_rewards(s), s.select_action_tokens(s.values), gamma=gamma, lambd=lambd)
        for s in samples
    ]
    told = [replace(s, returns=s.spread(row[1])) for s, row in zip(samples, rows, strict=True)]
    return _with_advantages(told, whitened([a for advantages, _ in rows for a in advantages]))


def distillation(samples: Sequence[Sample]) -> list[Sample]:
    """On-policy distillation: a token is as good as the teacher thinks it better than the policy.

    The penalty is the policy's logprob less the teacher's (KL in reward, k1); rewards are not
    looked at. https://thinkingmachines.ai/blog/on-policy-distillation
    """
    return [replace(s, advantages=tuple(-p for p in s.penalties) or s.advantages) for s in samples]


def normalize_batch(samples: Sequence[Sample]) -> list[Sample]:
    """Standardise over the chosen tokens of the batch, and over no others."""
    given = [a for sample in samples for a in sample.select_action_tokens(sample.advantages)]
    return _with_advantages(samples, standardized(given))


def split_turns(samples: Sequence[Sample]) -> list[Sample]:
    """Each turn a sample of its own: all that came before it, and credit on its own tokens only."""
    return [turn for sample in samples for turn in _turns(sample)]


def _turns(sample: Sample) -> list[Sample]:
    turns: list[Sample] = []
    for begin, end in sample.runs:
        mask = (False,) * begin + (True,) * (end - begin)

        def only(
            values: tuple[float, ...], begin: int = begin, end: int = end
        ) -> tuple[float, ...]:
            return (0.0,) * begin + values[begin:end] if values else ()

        turns.append(
            replace(
                sample,
                token_ids=sample.token_ids[:end],
                loss_mask=mask,
                logprobs=only(sample.logprobs),
                old_logprobs=only(sample.old_logprobs),
                advantages=only(sample.advantages),
                penalties=only(sample.penalties),
            )
        )
    return turns


def _token_rewards(sample: Sample) -> list[float]:
    penalties = (
        sample.select_action_tokens(sample.penalties)
        if sample.penalties
        else [0.0] * sample.n_action_tokens
    )
    rewards = [-penalty for penalty in penalties]
    rewards[-1] += sample.group_rewards[sample.attempt]
    return rewards


def _with_advantages(samples: Sequence[Sample], values_N: Floats) -> list[Sample]:
    """`values_N` holds one for each chosen token, sample after sample."""
    ends = np.cumsum([sample.n_action_tokens for sample in samples])
    rows = np.split(values_N, ends[:-1]) if samples else []
    return [
        replace(sample, advantages=sample.spread(row.tolist()))
        for sample, row in zip(samples, rows, strict=True)
    ]


_KEY = "trainer.algorithm.advantage_estimator"


def estimator_of(algorithm: Algorithm) -> Estimator:
    """One's own takes a group's rewards and returns an advantage each, or is a `BatchEstimator`."""
    name = algorithm.advantage_estimator
    if ":" in name:
        return _own(name, algorithm.advantage_estimator_kwargs)
    named: dict[str, Estimator] = {
        "grpo": partial(grpo, norm_by_std=algorithm.grpo_norm_by_std),
        "rloo": rloo,
        "maxrl": maxrl,
        "reinforce++": BatchEstimator(credit=partial(reinforce_plus_plus, gamma=algorithm.gamma)),
        "gae": BatchEstimator(
            credit=partial(generalized_advantage, gamma=algorithm.gamma, lambd=algorithm.lambd)
        ),
        "distillation": BatchEstimator(credit=distillation),
    }
    if name not in named:
        raise ConfigError(f"{_KEY}={name!r}; choose from {sorted(named)}, or module:function")
    return named[name]


def _own(name: str, kwargs: Mapping[str, Any]) -> Estimator:
    own = import_named(name, key=_KEY)
    given = partial(with_kwargs, kwargs=kwargs, named=f"{_KEY}={name!r}", key=f"{_KEY}_kwargs")
    if isinstance(own, BatchEstimator):
        return BatchEstimator(credit=given(own.credit, takes="a batch's samples"))
    if callable(own):
        return given(own, takes="a group's rewards")
    raise ConfigError(
        f"{_KEY}={name!r} is a {type(own).__name__}; name a function of a group's rewards, or a "
        "WholeBatch"
    )
