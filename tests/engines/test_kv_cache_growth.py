"""The CPU engine's KV cache takes memory on demand, and never changes a number by that."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tests.fakes.small_models import small_decoder

from skyfleet.chat.transcript import Completion
from skyfleet.engines import kv_cache
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.kv_cache import KVCache
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import OutOfMemoryError

ROWS, CAPACITY = 12, 200


def engine() -> EmbeddedEngine:
    return EmbeddedEngine(
        small_decoder(), decode_text=str, max_num_seqs=ROWS, capacity=CAPACITY, memory_plan="a plan"
    )


async def converse(served: EmbeddedEngine) -> list[Completion]:
    """Sessions of several lengths, more than there are rows, that share prefixes."""

    async def session(number: int) -> list[Completion]:
        token_ids = [(5 * i + number // 3) % 60 + 1 for i in range(20 + 3 * number)]
        completions = []
        for turn in range(3):
            sampling = SamplingParams(max_generate_length=10, seed=number)
            completion = await served.generate(token_ids, sampling, session=str(number))
            completions.append(completion)
            token_ids += [*completion.token_ids, *([turn + 1] * (number % 7))]
        return completions

    nested = await asyncio.gather(*map(session, range(ROWS + 6)))
    return [completion for completions in nested for completion in completions]


async def test_a_grown_cache_gives_the_bits_of_one_that_was_reserved_whole() -> None:
    grown, whole = engine(), engine()
    whole._cache.reserve(rows=ROWS, tokens=CAPACITY)
    assert grown._cache.n_bytes == 0
    assert await converse(grown) == await converse(whole)
    assert 0 < grown._cache.n_bytes <= whole._cache.n_bytes


async def test_memory_is_returned_during_sleep_and_taken_again() -> None:
    served = engine()
    first = await converse(served)
    await served.sleep()
    assert served._cache.n_bytes == 0
    await served.wake()
    assert await converse(served) == first


async def test_attending_a_few_prompts_at_a_time_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = await converse(engine())
    monkeypatch.setattr(kv_cache, "MASK_CELLS", 5000)
    assert await converse(engine()) == together


def test_growing_keeps_what_rows_hold_and_doubles_up_to_the_limits() -> None:
    cache = KVCache(small_decoder(), rows=5, capacity=100)
    cache.reserve(rows=2, tokens=30)
    cache.keys[1][1, :, 29] = 7.0
    cache.reserve(rows=3, tokens=31)
    assert cache.keys[1].shape[0] == 4
    assert cache.keys[1].shape[2] == 60
    cache.reserve(rows=5, tokens=61)
    assert cache.values[0].shape[0] == 5
    assert cache.values[0].shape[2] == 100
    assert torch.all(cache.keys[1][1, :, 29] == 7.0)
    assert cache.keys[1].count_nonzero() == cache.keys[1][1, :, 29].numel()


async def test_an_allocation_that_fails_is_one_sentence_with_the_keys_to_lower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = engine()
    monkeypatch.setattr(served._cache, "reserve", lambda **_: torch.empty(2**50))
    with pytest.raises(OutOfMemoryError) as failed:
        await served.generate([1, 2, 3], SamplingParams(max_generate_length=2), session="s")
    assert str(failed.value) == (
        "the engine ran out of memory (it tried to allocate 4503599627370496 bytes); a plan; lower "
        "generator.max_num_seqs, max_num_batched_tokens or max_input_length"
    )
