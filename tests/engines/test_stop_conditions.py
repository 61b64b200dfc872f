"""A turn ends at a stop token, a stop string or its length; the end is kept in the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.fakes.small_models import small_decoder

from skyfleet.chat.transcript import Completion
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampling_params import SamplingParams

PROMPT = [3, 1, 4, 1, 5]
FREE = SamplingParams(max_generate_length=20, temperature=3.0, seed=4)


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(32 + token) for token in token_ids)


async def generate(
    sampling: SamplingParams, decode_text: Callable[[Sequence[int]], str] = letters
) -> Completion:
    policy_model = EmbeddedEngine(
        small_decoder(), decode_text=decode_text, max_num_seqs=1, capacity=64
    )
    return await policy_model.generate(PROMPT, sampling, session="s")


async def test_max_generate_length_ends_a_turn() -> None:
    completion = await generate(FREE)
    assert (len(completion.token_ids), completion.finish) == (20, "length")


async def test_a_stop_token_ends_a_turn_and_is_kept() -> None:
    free = (await generate(FREE)).token_ids
    stop = next(token for token in free[5:] if token not in free[:5])
    end = free.index(stop) + 1
    completion = await generate(replace(FREE, stop_token_ids=(stop,)))
    assert (completion.token_ids, completion.finish) == (free[:end], "stop")


async def test_a_stop_string_across_tokens_ends_a_turn_and_is_kept() -> None:
    free = (await generate(FREE)).token_ids
    stop = letters(free[6:9])
    assert letters(free).index(stop) == 6
    completion = await generate(replace(FREE, stop=("never completion", stop)))
    assert (completion.token_ids, completion.finish) == (free[:9], "stop")


async def test_a_stop_string_at_the_last_allowed_token_counts_as_stop() -> None:
    free = (await generate(FREE)).token_ids
    completion = await generate(replace(FREE, max_generate_length=9, stop=(letters(free[6:9]),)))
    assert completion.finish == "stop"


async def test_a_stop_string_of_multi_byte_characters_is_found() -> None:
    stop = "終了日"
    for seed in range(100):
        sampling = replace(FREE, seed=seed)
        free = (await generate(sampling)).token_ids[:9]
        if len(set(free)) == 9:
            break
    byte_by_token = dict(zip(free, stop.encode(), strict=True))

    def one_byte_per_token(token_ids: Sequence[int]) -> str:
        return bytes(byte_by_token.get(token, 32) for token in token_ids).decode(errors="replace")

    completion = await generate(replace(sampling, stop=(stop,)), one_byte_per_token)
    assert (completion.token_ids, completion.finish) == (free, "stop")
