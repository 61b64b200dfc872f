"""The contract of every Engine as tests; an engine's own test file subclasses `EngineContract`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest
from tests.fakes.small_models import logprobs_of
from tests.fakes.tiny_policy import CAPACITY, TinyPolicy, tiny_policy

from skyfleet.chat.transcript import Completion
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError

PROMPT = [20 + (7 * i) % 61 for i in range(40)]
SAMPLING = SamplingParams(max_generate_length=12, temperature=0.8, seed=1)
LONG = SamplingParams(max_generate_length=400, seed=1)


class EngineContract(ABC):
    """The engine under test samples from `policy_model`; `behind` lists the in-process engines it uses."""

    behind: list[EmbeddedEngine | CudaEngine]
    tolerance = 1e-5
    hottest = 20.0
    """At this temperature any token is soon sampled."""

    @property
    def policy_model(self) -> TinyPolicy:
        return tiny_policy()

    @abstractmethod
    def opened(self) -> AbstractAsyncContextManager[Engine]:
        """A fresh engine; sets `behind`."""

    async def test_seed_and_session_determine_the_tokens(
        self,
    ) -> None:
        async with self.opened() as engine:
            one = await engine.generate(PROMPT, SAMPLING, session="a")
            await engine.release("a")
            again = await engine.generate(PROMPT, SAMPLING, session="a")
            other = await engine.generate(PROMPT, SAMPLING, session="b")
        assert one.token_ids == again.token_ids != other.token_ids
        assert (len(one.token_ids), one.finish) == (12, "length")

    async def test_logprobs_equal_those_of_a_full_forward_pass_in_every_turn(self) -> None:
        token_ids = list(PROMPT)
        async with self.opened() as engine:
            for turn in range(3):
                completion = await engine.generate(token_ids, SAMPLING, session="s")
                token_ids += completion.token_ids
                expected = logprobs_of(
                    self.policy_model.decoder, token_ids, len(completion.token_ids), temperature=0.8
                )
                assert completion.logprobs == pytest.approx(expected.tolist(), abs=self.tolerance)
                token_ids += [turn + 50] * 5

    async def test_logprobs_are_those_after_truncation(self) -> None:
        async with self.opened() as engine:
            certain = replace(SAMPLING, top_k=1, temperature=2.0)
            completion = await engine.generate(PROMPT, certain, session="s")
        assert completion.logprobs == pytest.approx([0.0] * 12, abs=1e-6)

    async def test_a_turn_prefills_only_new_tokens(self) -> None:
        async with self.opened() as engine:
            completion = await engine.generate(PROMPT, SAMPLING, session="s")
            assert self._computed() == 40 + 11  # the last token is computed with the next turn
            await engine.generate([*PROMPT, *completion.token_ids, 50, 51], SAMPLING, session="s")
            assert self._computed() == 40 + 11 + 1 + 2 + 11

    async def test_concurrent_requests_do_not_change_the_tokens(self) -> None:
        async with self.opened() as engine:
            alone = await engine.generate(PROMPT, SAMPLING, session="s")
        async with self.opened() as engine:
            others = [engine.generate(PROMPT[i:], SAMPLING, session=f"o{i}") for i in range(8)]
            among, *_ = await asyncio.gather(
                engine.generate(PROMPT, SAMPLING, session="s"), *others
            )
        assert among.token_ids == alone.token_ids

    async def test_a_stop_token_ends_a_turn_and_is_kept(self) -> None:
        async with self.opened() as engine:
            free = (await engine.generate(PROMPT, SAMPLING, session="s")).token_ids
            stop = next(token for token in free[4:] if token not in free[:4])
            stopping = replace(SAMPLING, stop_token_ids=(stop,))
            completion = await self._generate_again(engine, stopping)
        assert (completion.token_ids, completion.finish) == (free[: free.index(stop) + 1], "stop")

    async def test_only_stop_tokens_end_a_turn(self) -> None:
        eos = self.policy_model.tokenizer.eos_token_id
        hot = replace(SAMPLING, temperature=self.hottest, max_generate_length=60)
        async with self.opened() as engine:
            turns = [
                engine.generate(PROMPT, replace(hot, seed=seed), session=f"s{seed}")
                for seed in range(16)
            ]
            completions = await asyncio.gather(*turns)
        assert {(len(one.token_ids), one.finish) for one in completions} == {(60, "length")}
        assert any(eos in one.token_ids[:-1] for one in completions)

    async def test_a_stop_string_across_tokens_ends_a_turn_and_is_kept(self) -> None:
        text = self.policy_model.renderer.text
        async with self.opened() as engine:
            for seed in range(50):
                sampling = replace(SAMPLING, seed=seed)
                free = (await self._generate_again(engine, sampling)).token_ids
                stop = text(free[4:7])
                if stop.isascii() and text(free).index(stop) == len(text(free[:4])):
                    break
            completion = await self._generate_again(
                engine, replace(sampling, stop=("never completion", stop))
            )
        assert (completion.token_ids, completion.finish) == (free[:7], "stop")

    async def test_a_cancelled_turn_leaves_nothing_running_and_a_usable_engine(self) -> None:
        async with self.opened() as engine:
            turn = asyncio.create_task(engine.generate(PROMPT, LONG, session="gone"))
            while self._computed() < 60:  # noqa: ASYNC110 - an engine has no event for it
                await asyncio.sleep(0.001)
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
            computed = await self._wait_until_idle()
            assert computed < 400
            await engine.release("gone")
            completion = await engine.generate(PROMPT, SAMPLING, session="s")
            assert len(completion.token_ids) == 12

    async def test_releasing_an_unknown_session_is_ignored(self) -> None:
        async with self.opened() as engine:
            await engine.release("nobody")
            assert len((await engine.generate(PROMPT, SAMPLING, session="s")).token_ids) == 12

    async def test_sleeping_between_turns_does_not_change_the_tokens(self) -> None:
        async with self.opened() as engine:
            before = await engine.generate(PROMPT, SAMPLING, session="s")
            await engine.sleep()
            await engine.wake()
            after = await engine.generate(PROMPT, SAMPLING, session="s")
        assert after.token_ids == before.token_ids

    async def test_a_completion_has_the_policy_version_it_was_sampled_with(self) -> None:
        async with self.opened() as engine:
            for behind in self.behind:
                behind.policy_version = 7
            engine.policy_version = 7
            assert (await engine.generate(PROMPT, SAMPLING, session="s")).policy_version == 7

    async def test_an_empty_or_too_long_prompt_is_an_engine_error(self) -> None:
        async with self.opened() as engine:
            for prompt in ([], [50] * CAPACITY):
                with pytest.raises(EngineError):
                    await engine.generate(prompt, SAMPLING, session="s")

    def _computed(self) -> int:
        return sum(engine.tokens_computed for engine in self.behind)

    async def _wait_until_idle(self) -> int:
        """The number of tokens computed, once it stays constant."""
        before = -1
        while before != (now := self._computed()):
            before = now
            await asyncio.sleep(0.05)
        return now

    async def _generate_again(self, engine: Engine, sampling: SamplingParams) -> Completion:
        await engine.release("s")
        return await engine.generate(PROMPT, sampling, session="s")
