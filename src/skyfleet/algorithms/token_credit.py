"""Token credit: estimators and changes of credit that look at tokens, over a whole batch.

Every function takes a batch's samples and gives samples back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from skyfleet.algorithms.returns import Floats, discounted, gae, standardized, whitened
from skyfleet.algorithms.sample import Sample


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
        gae(_token_rewards(s), s.at_chosen(s.values), gamma=gamma, lambd=lambd) for s in samples
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
    given = [a for sample in samples for a in sample.at_chosen(sample.advantages)]
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
    penalties = sample.at_chosen(sample.penalties) if sample.penalties else [0.0] * sample.n_chosen
    rewards = [-penalty for penalty in penalties]
    rewards[-1] += sample.group_rewards[sample.attempt]
    return rewards


def _with_advantages(samples: Sequence[Sample], values_N: Floats) -> list[Sample]:
    """`values_N` holds one for each chosen token, sample after sample."""
    ends = np.cumsum([sample.n_chosen for sample in samples])
    rows = np.split(values_N, ends[:-1]) if samples else []
    return [
        replace(sample, advantages=sample.spread(row.tolist()))
        for sample, row in zip(samples, rows, strict=True)
    ]
