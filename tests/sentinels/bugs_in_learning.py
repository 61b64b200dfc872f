"""Bugs in engines, the learner and what passes between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.sentinels.bugs_in_tokens import asked
from tests.sentinels.planted import IN_REWARD, KL, Bug
from torch import Tensor

from skyfleet.algorithms import advantages as token_credit
from skyfleet.algorithms.sample import Sample
from skyfleet.chat.message import Message
from skyfleet.engines import embedded
from skyfleet.engines.sampler import draw
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.learner import single
from skyfleet.learner.batching import MicroBatch, mini_batches, pack
from skyfleet.learner.critic import Critic
from skyfleet.learner.single import SingleLearner
from skyfleet.models.decoder import Decoder
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.trainer.run import Run

Patch = pytest.MonkeyPatch
GAE = ("trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=tiny")
COOL = ("generator.sampling_params.temperature=0.6",)
NUCLEUS = "generator.sampling_params.top_p=0.95"
PENALISED = (IN_REWARD, "trainer.algorithm.kl_estimator_type=k1")


def packed(change: Callable[[MicroBatch], MicroBatch]) -> Callable[[Run, Patch], None]:
    """Plants `change` between samples and loss."""

    def plant(run: Run, patch: Patch) -> None:
        patch.setattr(single, "pack", lambda *a, **k: [change(b) for b in pack(*a, **k)])

    return plant


def raw_logprobs(run: Run, patch: Patch) -> None:
    def raw(logits_NV: Tensor, sampling: SamplingParams, u_N: Tensor) -> tuple[Tensor, Tensor]:
        tokens_N, _ = draw(logits_NV, sampling, u_N)
        raw_NV = torch.log_softmax(logits_NV, dim=-1)
        return tokens_N, raw_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)

    patch.setattr(embedded, "draw", raw)


def the_reference_ignores_the_temperature(run: Run, patch: Patch) -> None:
    own = SingleLearner._logprobs

    def scored(self: Any, decoder: Decoder, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if decoder is self._decoder:
            return own(self, decoder, batch)
        hot = copy.copy(self)
        hot._settings = replace(self._settings, temperature=1.0)
        return own(hot, decoder, batch)

    patch.setattr(SingleLearner, "_logprobs", scored)


def settings(**changes: Callable[[Any], Any]) -> Callable[[Run, Patch], None]:
    """Plants another of the learner's own functions."""

    def plant(run: Run, patch: Patch) -> None:
        learner: Any = run.learner
        own = learner._settings
        planted = {name: change(getattr(own, name)) for name, change in changes.items()}
        patch.setattr(learner, "_settings", replace(own, **planted))

    return plant


def the_last_mini_batch_is_dropped(run: Run, patch: Patch) -> None:
    def dropped(samples: Sequence[Sample], prompts: int) -> list[list[Sample]]:
        return mini_batches(samples, prompts)[:-1]

    patch.setattr(single, "mini_batches", dropped)


def the_critics_credit_is_lost(run: Run, patch: Patch) -> None:
    own = Critic.learn

    def learn(self: Critic, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        return list(samples), own(self, samples)[1]

    patch.setattr(Critic, "learn", learn)


def the_critics_credit_is_not_whitened(run: Run, patch: Patch) -> None:
    patch.setattr(token_credit, "whitened", lambda values: np.asarray(values) + 0.5)


def _blamed(rules: Any) -> Any:
    """Credit with the wrong sign."""

    def credit(samples: Sequence[Sample]) -> list[Sample]:
        return [
            replace(sample, advantages=tuple(-a for a in sample.advantages))
            for sample in rules.credit(samples)
        ]

    return replace(rules, credit=credit)


def _without_baseline(rules: Any) -> Any:
    def credit(samples: Sequence[Sample]) -> list[Sample]:
        return [
            replace(
                s, advantages=s.scatter_to_tokens([s.group_rewards[s.attempt]] * s.n_action_tokens)
            )
            for s in samples
        ]

    return replace(rules, credit=credit)


def nothing_can_be_parsed(run: Run, patch: Patch) -> None:
    async def generate(self: Any) -> Message:
        own: Message = await speaking(self)
        return replace(own, malformed_calls=("{",))

    speaking = TokenConversation.generate
    patch.setattr(TokenConversation, "generate", generate)


def _scaled(batch: MicroBatch) -> MicroBatch:
    return replace(batch, advantages_N=batch.advantages_N * batch.weights_N)


def _rotated(batch: MicroBatch) -> MicroBatch:
    return replace(batch, advantages_N=batch.advantages_N.roll(len(batch.advantages_N) // 3))


def _late(batch: MicroBatch) -> MicroBatch:
    return replace(batch, before_N=batch.before_N - 1)


IN_LEARNING = (
    Bug(
        name="engine logprobs before temperature, learner logprobs after it",
        source="SkyRL 6",
        sentinel="logprob_gap",
        plant=raw_logprobs,
        settings=COOL,
        says="cause: temperature",
    ),
    Bug(
        name="a sampling parameter is not forwarded to the engine",
        source="SkyRL 12",
        sentinel="logprob_gap",
        plant=asked(lambda sampling: replace(sampling, temperature=1.0)),
        settings=COOL,
        says="cause: temperature",
    ),
    Bug(
        name="the engine truncates the vocabulary and nobody accounts for it",
        source="SkyRL 6",
        sentinel="logprob_gap",
        plant=asked(lambda sampling: replace(sampling, top_k=40)),
        says="cause: truncation",
    ),
    Bug(
        name="logprobs are taken one place off after packing",
        source="Fleet 61",
        sentinel="logprob_gap",
        plant=packed(_late),
        says="cause: other tokens",
    ),
    Bug(
        name="engine logprobs before temperature, under a nucleus",
        source="SkyRL 6",
        sentinel="logprob_gap",
        plant=raw_logprobs,
        settings=(*COOL, NUCLEUS),
    ),
    Bug(
        name="a sampling parameter is not forwarded to the engine, under a nucleus",
        source="SkyRL 12",
        sentinel="logprob_gap",
        plant=asked(lambda sampling: replace(sampling, temperature=1.0)),
        settings=(*COOL, NUCLEUS),
    ),
    Bug(
        name="logprobs are taken one place off after packing, under a nucleus",
        source="Fleet 61",
        sentinel="logprob_gap",
        plant=packed(_late),
        settings=(NUCLEUS,),
    ),
    Bug(
        name="the engine keeps less of the vocabulary than its nucleus",
        source="SkyRL 6",
        sentinel="logprob_gap",
        plant=asked(lambda sampling: replace(sampling, top_p=0.3)),
        settings=(NUCLEUS,),
    ),
    Bug(
        name="the reference ignores the temperature",
        source="SkyRL 6",
        sentinel="reference",
        plant=the_reference_ignores_the_temperature,
        settings=(KL, *COOL),
    ),
    Bug(
        name="the reference is not renewed with the epoch",
        source="also",
        sentinel="reference",
        plant=lambda run, patch: patch.setattr(SingleLearner, "renew_reference", lambda self: None),
        settings=(KL, "trainer.update_ref_every_epoch=true"),
        after=1,
        shows_later=True,
    ),
    Bug(
        name="the KL term has no gradient",
        source="SkyRL 1",
        sentinel="gradient",
        plant=settings(kl=lambda kl: lambda own, ref: kl(own.detach(), ref)),
        settings=(KL,),
    ),
    Bug(
        name="clip_cov is given advantages already divided by the tokens",
        source="SkyRL 2",
        sentinel="loss_advantages",
        plant=packed(_scaled),
        settings=("trainer.algorithm.policy_loss_type=clip_cov",),
    ),
    Bug(
        name="kl_cov is given advantages already divided by the tokens",
        source="SkyRL 3",
        sentinel="loss_advantages",
        plant=packed(_scaled),
        settings=("trainer.algorithm.policy_loss_type=kl_cov",),
    ),
    Bug(
        name="packing puts advantages at other sequences",
        source="Fleet 61",
        sentinel="loss_advantages",
        plant=packed(_rotated),
    ),
    Bug(
        name="the rest of a batch that no mini-batch holds is dropped",
        source="Fleet 59",
        sentinel="loss_inputs",
        plant=the_last_mini_batch_is_dropped,
    ),
    Bug(
        name="the policy is not given the credit that the critic's values make",
        source="also",
        sentinel="loss_advantages",
        plant=the_critics_credit_is_lost,
        settings=GAE,
        says="no token has an advantage",
    ),
    Bug(
        name="advantages are not whitened, so most of a batch is praised",
        source="also",
        sentinel="loss_advantages",
        plant=the_critics_credit_is_not_whitened,
        settings=GAE,
        says="another mean than 0",
    ),
    Bug(
        name="with KL in the reward, credit has the wrong sign",
        source="also",
        sentinel="loss_advantages",
        plant=settings(reward_kl=_blamed),
        settings=PENALISED,
    ),
    Bug(
        name="with KL in the reward, credit has no baseline",
        source="also",
        sentinel="loss_advantages",
        plant=settings(reward_kl=_without_baseline),
        settings=PENALISED,
    ),
    Bug(
        name="with KL in the reward, packing puts advantages at other sequences",
        source="Fleet 61",
        sentinel="loss_advantages",
        plant=packed(_rotated),
        settings=PENALISED,
    ),
    Bug(
        name="with whitened credit, clip_cov is given advantages already divided by the tokens",
        source="SkyRL 2",
        sentinel="loss_advantages",
        plant=packed(_scaled),
        settings=(
            "trainer.algorithm.policy_loss_type=clip_cov",
            "trainer.algorithm.advantage_batch_normalize=true",
        ),
    ),
    Bug(
        name="the gradient is not a number",
        source="Fleet 55",
        sentinel="finite_numbers",
        plant=settings(reduce=lambda reduce: lambda n, p: [float("nan")] * len(n)),
    ),
    Bug(
        name="the parser wants a tag that the stop string took away",
        source="Fleet 9",
        sentinel="parse_failures",
        plant=nothing_can_be_parsed,
    ),
)
