"""Bugs in engines, the learner and what passes between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.sentinels.bugs_in_tokens import change_sampling
from tests.sentinels.planted import IN_REWARD, KL, Bug
from torch import Tensor

from skyfleet.algorithms import advantages
from skyfleet.algorithms.sample import Sample
from skyfleet.chat.message import Message
from skyfleet.engines import embedded
from skyfleet.engines.sampler import sample_tokens
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.learner import single_device
from skyfleet.learner.batching import MicroBatch, mini_batches, pack
from skyfleet.learner.critic import Critic
from skyfleet.learner.single_device import SingleDeviceLearner
from skyfleet.models.decoder import Decoder
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.trainer.run import Run

Patch = pytest.MonkeyPatch
GAE = ("trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=tiny")
COOL = ("generator.sampling_params.temperature=0.6",)
NUCLEUS = "generator.sampling_params.top_p=0.95"
PENALISED = (IN_REWARD, "trainer.algorithm.kl_estimator_type=k1")


def change_batches(change: Callable[[MicroBatch], MicroBatch]) -> Callable[[Run, Patch], None]:
    """Plants `change` between packing and loss."""

    def plant(run: Run, patch: Patch) -> None:
        patch.setattr(single_device, "pack", lambda *a, **k: [change(b) for b in pack(*a, **k)])

    return plant


def raw_logprobs(run: Run, patch: Patch) -> None:
    def raw(logits_NV: Tensor, sampling: SamplingParams, u_N: Tensor) -> tuple[Tensor, Tensor]:
        tokens_N, _ = sample_tokens(logits_NV, sampling, u_N)
        raw_NV = torch.log_softmax(logits_NV, dim=-1)
        return tokens_N, raw_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)

    patch.setattr(embedded, "sample_tokens", raw)


def the_reference_ignores_the_temperature(run: Run, patch: Patch) -> None:
    own = SingleDeviceLearner._logprobs

    def scored(self: Any, decoder: Decoder, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if decoder is self.decoder:
            return own(self, decoder, batch)
        hot = copy.copy(self)
        hot._settings = replace(self._settings, temperature=1.0)
        return own(hot, decoder, batch)

    patch.setattr(SingleDeviceLearner, "_logprobs", scored)


def change_settings(**changes: Callable[[Any], Any]) -> Callable[[Run, Patch], None]:
    """Plants another function in the learner's settings."""

    def plant(run: Run, patch: Patch) -> None:
        learner: Any = run.learner
        own = learner._settings
        planted = {name: change(getattr(own, name)) for name, change in changes.items()}
        patch.setattr(learner, "_settings", replace(own, **planted))

    return plant


def the_last_mini_batch_is_dropped(run: Run, patch: Patch) -> None:
    def dropped(samples: Sequence[Sample], prompts: int) -> list[list[Sample]]:
        return mini_batches(samples, prompts)[:-1]

    patch.setattr(single_device, "mini_batches", dropped)


def the_critics_advantages_are_lost(run: Run, patch: Patch) -> None:
    own = Critic.learn

    def learn(self: Critic, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        return list(samples), own(self, samples)[1]

    patch.setattr(Critic, "learn", learn)


def the_critics_advantages_are_not_whitened(run: Run, patch: Patch) -> None:
    patch.setattr(advantages, "whiten", lambda values: np.asarray(values) + 0.5)


def _negate(rules: Any) -> Any:

    def compute(samples: Sequence[Sample]) -> list[Sample]:
        return [
            replace(sample, advantages=tuple(-a for a in sample.advantages))
            for sample in rules.compute_advantages(samples)
        ]

    return replace(rules, compute_advantages=compute)


def _without_baseline(rules: Any) -> Any:
    def compute(samples: Sequence[Sample]) -> list[Sample]:
        return [
            replace(
                s, advantages=s.scatter_to_tokens([s.group_rewards[s.attempt]] * s.n_action_tokens)
            )
            for s in samples
        ]

    return replace(rules, compute_advantages=compute)


def nothing_can_be_parsed(run: Run, patch: Patch) -> None:
    async def generate(self: Any) -> Message:
        own: Message = await original(self)
        return replace(own, malformed_calls=("{",))

    original = TokenConversation.generate
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
        expected_text="cause: temperature",
    ),
    Bug(
        name="a sampling parameter is not forwarded to the engine",
        source="SkyRL 12",
        sentinel="logprob_gap",
        plant=change_sampling(lambda sampling: replace(sampling, temperature=1.0)),
        settings=COOL,
        expected_text="cause: temperature",
    ),
    Bug(
        name="the engine truncates the vocabulary without being configured to",
        source="SkyRL 6",
        sentinel="logprob_gap",
        plant=change_sampling(lambda sampling: replace(sampling, top_k=40)),
        expected_text="cause: truncation",
    ),
    Bug(
        name="logprobs are shifted by one position after packing",
        source="Fleet 61",
        sentinel="logprob_gap",
        plant=change_batches(_late),
        expected_text="cause: other tokens",
    ),
    Bug(
        name="engine logprobs before temperature, with top-p",
        source="SkyRL 6",
        sentinel="logprob_gap",
        plant=raw_logprobs,
        settings=(*COOL, NUCLEUS),
    ),
    Bug(
        name="a sampling parameter is not forwarded to the engine, with top-p",
        source="SkyRL 12",
        sentinel="logprob_gap",
        plant=change_sampling(lambda sampling: replace(sampling, temperature=1.0)),
        settings=(*COOL, NUCLEUS),
    ),
    Bug(
        name="logprobs are shifted by one position after packing, with top-p",
        source="Fleet 61",
        sentinel="logprob_gap",
        plant=change_batches(_late),
        settings=(NUCLEUS,),
    ),
    Bug(
        name="the engine keeps fewer tokens than top-p allows",
        source="SkyRL 6",
        sentinel="logprob_gap",
        plant=change_sampling(lambda sampling: replace(sampling, top_p=0.3)),
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
        source="other",
        sentinel="reference",
        plant=lambda run, patch: patch.setattr(
            SingleDeviceLearner, "renew_reference", lambda self: None
        ),
        settings=(KL, "trainer.update_ref_every_epoch=true"),
        after=1,
        shows_later=True,
    ),
    Bug(
        name="the KL term has no gradient",
        source="SkyRL 1",
        sentinel="gradient",
        plant=change_settings(kl=lambda kl: lambda own, ref: kl(own.detach(), ref)),
        settings=(KL,),
    ),
    Bug(
        name="clip_cov gets advantages already divided by the tokens",
        source="SkyRL 2",
        sentinel="loss_advantages",
        plant=change_batches(_scaled),
        settings=("trainer.algorithm.policy_loss_type=clip_cov",),
    ),
    Bug(
        name="kl_cov gets advantages already divided by the tokens",
        source="SkyRL 3",
        sentinel="loss_advantages",
        plant=change_batches(_scaled),
        settings=("trainer.algorithm.policy_loss_type=kl_cov",),
    ),
    Bug(
        name="packing assigns advantages to other sequences",
        source="Fleet 61",
        sentinel="loss_advantages",
        plant=change_batches(_rotated),
    ),
    Bug(
        name="the remainder of a batch that fills no mini-batch is dropped",
        source="Fleet 59",
        sentinel="loss_inputs",
        plant=the_last_mini_batch_is_dropped,
    ),
    Bug(
        name="the policy does not get the critic's advantages",
        source="other",
        sentinel="loss_advantages",
        plant=the_critics_advantages_are_lost,
        settings=GAE,
        expected_text="all advantages are 0",
    ),
    Bug(
        name="the critic's advantages are not whitened",
        source="other",
        sentinel="loss_advantages",
        plant=the_critics_advantages_are_not_whitened,
        settings=GAE,
        expected_text="a mean other than 0",
    ),
    Bug(
        name="with KL in the reward, advantages have the wrong sign",
        source="other",
        sentinel="loss_advantages",
        plant=change_settings(reward_kl=_negate),
        settings=PENALISED,
    ),
    Bug(
        name="with KL in the reward, advantages have no baseline",
        source="other",
        sentinel="loss_advantages",
        plant=change_settings(reward_kl=_without_baseline),
        settings=PENALISED,
    ),
    Bug(
        name="with KL in the reward, packing assigns advantages to other sequences",
        source="Fleet 61",
        sentinel="loss_advantages",
        plant=change_batches(_rotated),
        settings=PENALISED,
    ),
    Bug(
        name="with whitened advantages, clip_cov gets advantages already divided by the tokens",
        source="SkyRL 2",
        sentinel="loss_advantages",
        plant=change_batches(_scaled),
        settings=(
            "trainer.algorithm.policy_loss_type=clip_cov",
            "trainer.algorithm.advantage_batch_normalize=true",
        ),
    ),
    Bug(
        name="the gradient is not finite",
        source="Fleet 55",
        sentinel="finite_numbers",
        plant=change_settings(reduce=lambda reduce: lambda n, p: [float("nan")] * len(n)),
    ),
    Bug(
        name="the parser needs a tag that the stop string removed",
        source="Fleet 9",
        sentinel="parse_failures",
        plant=nothing_can_be_parsed,
    ),
)
