"""Bugs between the tokens of an engine and the samples made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.sentinels.planted import Bug

from skyfleet.algorithms.credit_assignment import assign_credit
from skyfleet.algorithms.sample import Sample
from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Completion, Transcript
from skyfleet.engines import embedded
from skyfleet.engines.sampler import make_rng
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.rollouts import episode
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.trainer import build_run
from skyfleet.trainer.run import Run

Patch = pytest.MonkeyPatch


def change_samples(change: Callable[[list[Sample]], list[Sample]]) -> Callable[[Run, Patch], None]:
    """Plants `change` after credit assignment."""

    def plant(run: Run, patch: Patch) -> None:
        patch.setattr(build_run, "assign_credit", lambda *a, **k: change(assign_credit(*a, **k)))

    return plant


def observations_are_trained_on(run: Run, patch: Patch) -> None:
    append_prompt = Transcript.append_prompt

    def masked(self: Transcript, token_ids: Sequence[int]) -> None:
        is_observation = bool(self.token_ids)
        append_prompt(self, token_ids)
        if is_observation:
            self._loss_mask[-len(token_ids) :] = [True] * len(token_ids)

    patch.setattr(Transcript, "append_prompt", masked)


def last_token_is_masked(run: Run, patch: Patch) -> None:
    say = Transcript.append_completion

    def cut(self: Transcript, completion: Completion) -> None:
        say(self, completion)
        self._loss_mask[-1] = False

    patch.setattr(Transcript, "append_completion", cut)


def last_token_gets_a_dummy_logprob(run: Run, patch: Patch) -> None:
    say = Transcript.append_completion

    def dummy(self: Transcript, completion: Completion) -> None:
        say(self, completion)
        self._logprobs[-1] = 0.0

    patch.setattr(Transcript, "append_completion", dummy)


def text_is_retokenized(run: Run, patch: Patch) -> None:
    async def generate(self: Any) -> Message:
        transcript = self._transcripts[-1]
        completion = await self._complete(transcript.token_ids)
        message: Message = self._renderer.parse(completion.token_ids, self._tools)
        again = tuple(self._renderer.render_completion(message))
        transcript.append_completion(
            replace(completion, token_ids=again, logprobs=(-1.0,) * len(again))
        )
        self.finish = completion.finish
        self._history.messages.append(message)
        return message

    patch.setattr(TokenConversation, "generate", generate)


def prompt_is_cut_for_the_engine(run: Run, patch: Patch) -> None:
    complete = TokenConversation._complete

    async def cut(self: TokenConversation, token_ids: Sequence[int]) -> Completion:
        return await complete(self, token_ids[-100:])

    patch.setattr(TokenConversation, "_complete", cut)


def turns_are_unlimited(run: Run, patch: Patch) -> None:
    run_turns = episode._run_turns

    async def longer(state: Any, env: Any, conversation: Any, limits: Any, guard: Any) -> Any:
        return await run_turns(state, env, conversation, replace(limits, max_turns=20), guard)

    patch.setattr(episode, "_run_turns", longer)


def change_sampling(
    change: Callable[[SamplingParams], SamplingParams],
) -> Callable[[Run, Patch], None]:
    """Plants an engine that samples with other parameters."""

    def plant(run: Run, patch: Patch) -> None:
        engine = run.inference.engines[0]
        generate = engine.generate

        async def generate_changed(
            token_ids: Sequence[int], sampling: SamplingParams, *, session: str
        ) -> Completion:
            return await generate(token_ids, change(sampling), session=session)

        patch.setattr(engine, "generate", generate_changed)

    return plant


def all_attempts_share_a_seed(run: Run, patch: Patch) -> None:
    patch.setattr(embedded, "make_rng", lambda seed, *_: make_rng(seed, "", 0))


def _shorter(sample: Sample, end: int) -> Sample:
    return replace(
        sample,
        token_ids=sample.token_ids[:end],
        loss_mask=sample.loss_mask[:end],
        logprobs=sample.logprobs[:end],
        advantages=sample.advantages[:end],
    )


def _without_system_prompt(sample: Sample) -> Sample:
    return replace(sample, token_ids=(*sample.token_ids[:5], 7, *sample.token_ids[6:]))


IN_TOKENS = (
    Bug(
        name="a sampled end token is replaced by one with logprob 0",
        source="SkyRL 13",
        sentinel="sampled_tokens",
        plant=last_token_gets_a_dummy_logprob,
    ),
    Bug(
        name="a completion is tokenized again from its text",
        source="SkyRL 15",
        sentinel="sampled_tokens",
        plant=text_is_retokenized,
    ),
    Bug(
        name="a prompt over the limit is truncated before the engine gets it",
        source="other",
        sentinel="sampled_tokens",
        plant=prompt_is_cut_for_the_engine,
    ),
    Bug(
        name="tool results are trained on",
        source="other",
        sentinel="loss_mask",
        plant=observations_are_trained_on,
        expected_text="observation",
    ),
    Bug(
        name="the token that ends a turn is not trained on",
        source="other",
        sentinel="loss_mask",
        plant=last_token_is_masked,
        expected_text="sampled",
    ),
    Bug(
        name="max_turns is not enforced",
        source="SkyRL 11",
        sentinel="limits",
        plant=turns_are_unlimited,
    ),
    Bug(
        name="the engine ignores max_generate_length",
        source="other",
        sentinel="limits",
        plant=change_sampling(lambda sampling: replace(sampling, max_generate_length=20)),
    ),
    Bug(
        name="every attempt is sampled with the same seed",
        source="other",
        sentinel="repeated_draws",
        plant=all_attempts_share_a_seed,
    ),
    Bug(
        name="long sequences are truncated before the learner gets them",
        source="other",
        sentinel="token_conservation",
        plant=change_samples(lambda samples: [_shorter(s, len(s.token_ids) - 3) for s in samples]),
    ),
    Bug(
        name="samples that do not fill a mini-batch are dropped",
        source="Fleet 59",
        sentinel="token_conservation",
        plant=change_samples(lambda samples: samples[:-3]),
    ),
    Bug(
        name="the learner gets another prompt than the engine",
        source="other",
        sentinel="trained_tokens",
        plant=change_samples(lambda samples: list(map(_without_system_prompt, samples))),
    ),
)
