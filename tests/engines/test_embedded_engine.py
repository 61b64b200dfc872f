"""The embedded engine returns what a fresh forward pass returns, however its work is batched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from tests.fakes.small_models import logprobs_of, small_decoder

from skyfleet.chat.transcript import Completion
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError
from skyfleet.models.decoder import Decoder

PROMPT = [(7 * i) % 61 for i in range(40)]
SAMPLING = SamplingParams(max_generate_length=12, temperature=0.8, seed=1)


def engine(
    decoder: Decoder | None = None, *, rows: int = 64, batched_tokens: int = 8192
) -> EmbeddedEngine:
    return EmbeddedEngine(
        decoder or small_decoder(),
        decode_text=lambda token_ids: "".join(chr(32 + token) for token in token_ids),
        max_num_seqs=rows,
        capacity=160,
        max_num_batched_tokens=batched_tokens,
    )


async def converse(
    policy_model: EmbeddedEngine, session: str, *, turns: int = 3, prompt: Sequence[int] = PROMPT
) -> tuple[list[int], list[Completion]]:
    """Several turns with five given tokens between them: the whole sequence, and the completions."""
    token_ids, completions = list(prompt), []
    for turn in range(turns):
        completion = await policy_model.generate(token_ids, SAMPLING, session=session)
        completions.append(completion)
        token_ids = [*token_ids, *completion.token_ids, *([turn + 1] * 5)]
    return token_ids, completions


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


async def test_logprobs_equal_those_of_a_full_forward_pass_in_every_turn() -> None:
    decoder = small_decoder()
    policy_model, token_ids = engine(decoder), list(PROMPT)
    for turn in range(4):
        completion = await policy_model.generate(token_ids, SAMPLING, session="s")
        token_ids += completion.token_ids
        expected = logprobs_of(decoder, token_ids, len(completion.token_ids), temperature=0.8)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        token_ids += [turn + 1] * 5


async def test_a_turn_prefills_only_new_tokens() -> None:
    policy_model = engine()
    await converse(policy_model, "s", turns=1)
    assert policy_model.tokens_computed == 40 + 11  # the last token of a turn waits for the next
    await converse(engine(), "other")
    computed = engine()
    await converse(computed, "s", turns=2)
    assert computed.tokens_computed == 40 + 11 + 1 + 5 + 11


async def test_other_requests_in_the_batch_do_not_change_the_tokens() -> None:
    _, alone = await converse(engine(), "s")
    crowded = engine()
    others = [converse(crowded, f"o{i}", prompt=PROMPT[i:]) for i in range(30)]
    (_, among), *_ = await asyncio.gather(converse(crowded, "s"), *others)
    assert tokens(among) == tokens(alone)


async def test_seed_session_and_position_determine_the_tokens() -> None:
    policy_model = engine()
    _, one = await converse(policy_model, "a")
    await policy_model.release("a")
    _, again = await converse(policy_model, "a")
    _, other = await converse(policy_model, "b")
    assert tokens(one) == tokens(again)
    assert tokens(one)[0] != tokens(other)[0]


@pytest.mark.parametrize("batched_tokens", [8192, 16])
async def test_the_prompt_of_a_group_is_computed_once(batched_tokens: int) -> None:
    policy_model = engine(batched_tokens=batched_tokens)
    once = SamplingParams(max_generate_length=1, seed=1)
    await asyncio.gather(*[policy_model.generate(PROMPT, once, session=f"s{i}") for i in range(8)])
    # Two blocks of 16 are shared; each of the seven siblings reads the last eight tokens.
    assert policy_model.tokens_computed == 40 + 7 * 8


@pytest.mark.parametrize("rows", [1, 3])
async def test_more_sessions_than_rows_give_the_same_tokens(rows: int) -> None:
    roomy, narrow = engine(), engine(rows=rows)
    expected = await asyncio.gather(*[converse(roomy, f"s{i}") for i in range(5)])
    got = await asyncio.gather(*[converse(narrow, f"s{i}") for i in range(5)])
    assert [tokens(completions) for _, completions in got] == [
        tokens(completions) for _, completions in expected
    ]


@pytest.mark.parametrize("batched_tokens", [1, 7, 17])
async def test_chunked_prefill_gives_the_same_tokens(batched_tokens: int) -> None:
    whole, chunked = engine(), engine(batched_tokens=batched_tokens)
    expected = await asyncio.gather(*[converse(whole, f"s{i}") for i in range(4)])
    got = await asyncio.gather(*[converse(chunked, f"s{i}") for i in range(4)])
    assert [tokens(completions) for _, completions in got] == [
        tokens(completions) for _, completions in expected
    ]


async def test_a_prompt_that_is_too_long_is_an_engine_error() -> None:
    long = SamplingParams(max_generate_length=121)
    with pytest.raises(EngineError, match=r"40 prompt tokens .*=121 exceed the engine's 160"):
        await engine().generate(PROMPT, long, session="s")
    with pytest.raises(EngineError, match="prompt is empty"):
        await engine().generate([], SAMPLING, session="s")


async def test_the_whole_capacity_can_be_used() -> None:
    full = SamplingParams(max_generate_length=120, seed=1)
    completion = await engine().generate(PROMPT, full, session="s")
    assert (len(completion.token_ids), completion.finish) == (120, "length")


async def test_greedy_sampling_takes_the_most_likely_token() -> None:
    decoder = small_decoder()
    greedy = SamplingParams(max_generate_length=6, temperature=0)
    completion = await engine(decoder).generate(PROMPT, greedy, session="s")
    assert completion.logprobs == (0.0,) * 6
    token_ids = list(PROMPT)
    for token in completion.token_ids:
        token_ids.append(token)
        every = [logprobs_of(decoder, [*token_ids[:-1], other], 1).item() for other in range(64)]
        assert token == torch.tensor(every).argmax().item()
