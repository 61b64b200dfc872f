"""The CUDA engine: scheduling, prefix caching, stops and preemption, on plain torch without a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.fakes.cuda_engines import PROMPT, SAMPLING, crowd, engine, page_bytes
from tests.fakes.small_models import llama, logprobs_of, qwen2, qwen3, small_decoder

from skyfleet.engines.cuda.decode import truncate_logits
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampler import sample_tokens
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError
from skyfleet.models.decoder import Decoder

KINDS = [
    SAMPLING,
    SamplingParams(max_generate_length=12, temperature=0.0, seed=1),
    SamplingParams(max_generate_length=12, top_p=0.7, top_k=9, min_p=0.02, seed=1),
    SamplingParams(max_generate_length=1, seed=1),
]


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
@pytest.mark.parametrize("sampling", KINDS)
async def test_it_samples_the_same_tokens_as_the_cpu_engine(
    sampling: SamplingParams, make: Callable[[], Any]
) -> None:
    decoder = Decoder(make(), max_positions=160)
    plain = EmbeddedEngine(decoder, decode_text=str, max_num_seqs=64, capacity=160)
    expected = await crowd(plain, sampling)
    completion = await crowd(engine(decoder), sampling)
    assert [c.token_ids for c in completion] == [c.token_ids for c in expected]
    for one, other in zip(completion, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.finish == other.finish


async def test_a_turn_prefills_only_new_blocks() -> None:
    policy_model = engine()
    first = await policy_model.generate(PROMPT, SAMPLING, session="s")
    assert policy_model.tokens_computed == 40 + 12
    before = policy_model.tokens_computed
    token_ids = [*PROMPT, *first.token_ids, 1, 2, 3]
    second = await policy_model.generate(token_ids, SAMPLING, session="s")
    # Of 55 tokens, three whole blocks of 16 are cached.
    assert policy_model.tokens_computed - before == 55 - 48 + 12
    whole = [*token_ids, *second.token_ids]
    expected = logprobs_of(policy_model.decoder, whole, 12, temperature=0.8)
    assert second.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


async def test_the_prompt_of_a_group_is_prefilled_once() -> None:
    policy_model = engine()
    await asyncio.gather(
        *(policy_model.generate(PROMPT, SAMPLING, session=f"s{n}") for n in range(6))
    )
    assert policy_model.tokens_computed == 40 + 5 * (40 - 32) + 6 * 12


@pytest.mark.parametrize(
    ("n_samples", "budget", "n_rounds"),
    # Others wait for the first prefill; 40 tokens take three passes of 17, and five of 8.
    [(6, 8192, 1), (1, 17, 1), (1, 8, 2)],
)
async def test_a_round_queues_up_to_four_prefills_before_decoding(
    n_samples: int, budget: int, n_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first of twelve tokens and eleven more are one round.
    policy_model = engine(steps_per_round=11, max_num_batched_tokens=budget)
    rounds, begin_round = 0, policy_model._slots.begin_round

    def counted() -> None:
        nonlocal rounds
        rounds += 1
        begin_round()

    monkeypatch.setattr(policy_model._slots, "begin_round", counted)
    requests = [policy_model.generate(PROMPT, SAMPLING, session=f"s{n}") for n in range(n_samples)]
    await asyncio.gather(*requests)
    assert rounds == n_rounds


async def test_new_weights_drop_the_prefix_cache() -> None:
    decoder = small_decoder()
    policy_model = engine(decoder)
    await policy_model.generate(PROMPT, SAMPLING, session="s")
    with torch.no_grad():
        for parameter in decoder.module.parameters():
            parameter.mul_(1.1)
    policy_model.policy_version = 1
    completion = await policy_model.generate(PROMPT, SAMPLING, session="s")
    fresh = await engine(decoder).generate(PROMPT, SAMPLING, session="s")
    assert completion.token_ids == fresh.token_ids
    assert completion.logprobs == pytest.approx(fresh.logprobs, abs=1e-6)
    assert completion.policy_version == 1


async def test_a_turn_during_a_weight_update_keeps_its_oldest_version() -> None:
    policy_model = engine()
    turn = asyncio.ensure_future(policy_model.generate(PROMPT, SAMPLING, session="s"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    policy_model.policy_version = 5
    completion = await turn
    assert (len(completion.token_ids), completion.policy_version) == (12, 0)


async def test_a_preempted_request_continues_with_the_same_tokens() -> None:
    # Nine blocks in total: three sequences of 52 tokens need twelve.
    decoder = small_decoder()
    tight = engine(decoder, memory_bytes=9 * page_bytes(decoder))
    prompts = [[n, *PROMPT[1:]] for n in range(3)]
    completion = await asyncio.gather(
        *(tight.generate(p, SAMPLING, session=f"s{n}") for n, p in enumerate(prompts))
    )
    alone = [
        await engine(decoder).generate(p, SAMPLING, session=f"s{n}") for n, p in enumerate(prompts)
    ]
    assert [c.token_ids for c in completion] == [c.token_ids for c in alone]


async def test_a_sequence_larger_than_the_memory_fails_alone() -> None:
    decoder = small_decoder()
    tight = engine(decoder, memory_bytes=3 * page_bytes(decoder))
    small = asyncio.ensure_future(tight.generate(PROMPT[:20], SAMPLING, session="t"))
    for prompt in (PROMPT, PROMPT * 3):
        with pytest.raises(EngineError, match="do not fit in the engine's memory"):
            await tight.generate(prompt, SAMPLING, session="s")
    assert len((await small).token_ids) == 12


async def test_after_an_error_in_a_round_the_engine_still_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy_model = engine()
    with monkeypatch.context() as broken:
        broken.setattr(policy_model._slots, "decode", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await policy_model.generate(PROMPT, SAMPLING, session="s")
    assert policy_model._scheduler.n_available == policy_model._scheduler.n_blocks
    assert len((await policy_model.generate(PROMPT, SAMPLING, session="s")).token_ids) == 12


async def test_a_cancelled_turn_frees_its_slot_and_blocks() -> None:
    policy_model = engine(max_num_seqs=1)
    turn = asyncio.ensure_future(
        policy_model.generate(PROMPT, SamplingParams(max_generate_length=100, seed=1), session="s")
    )
    await asyncio.sleep(0)
    turn.cancel()
    completion = await policy_model.generate(PROMPT, SAMPLING, session="t")
    assert len(completion.token_ids) == 12
    assert policy_model._scheduler.n_available == 80 // 8  # 160 tokens, all blocks free again


@pytest.mark.parametrize("batched_tokens", [8, 17, 64])
async def test_chunked_prefill_gives_the_same_tokens(batched_tokens: int) -> None:
    decoder = small_decoder()
    whole = await crowd(engine(decoder), SAMPLING)
    parts = await crowd(engine(decoder, max_num_batched_tokens=batched_tokens), SAMPLING)
    assert [c.token_ids for c in parts] == [c.token_ids for c in whole]


async def test_a_stop_string_ends_the_turn_at_its_token() -> None:
    policy_model = engine()
    free = await policy_model.generate(PROMPT, SAMPLING, session="s")
    stop = chr(32 + free.token_ids[6])
    cut = free.token_ids[: free.token_ids.index(free.token_ids[6]) + 1]
    sampling = SamplingParams(max_generate_length=12, temperature=0.8, seed=1, stop=(stop,))
    completion = await policy_model.generate(PROMPT, sampling, session="s")
    assert (completion.token_ids, completion.finish) == (cut, "stop")
    token = SamplingParams(
        max_generate_length=12, temperature=0.8, seed=1, stop_token_ids=(free.token_ids[6],)
    )
    assert (await policy_model.generate(PROMPT, token, session="s")).token_ids == cut


async def test_blocks_are_reserved_for_each_sequences_own_remaining_tokens() -> None:
    """Otherwise a sequence that nearly fills the pool could never continue beside a long one."""
    decoder = small_decoder()
    policy_model = engine(decoder, steps_per_round=32, memory_bytes=5 * page_bytes(decoder))
    long, short = await asyncio.wait_for(
        asyncio.gather(
            policy_model.generate(
                [3] * 64, SamplingParams(max_generate_length=5, seed=1), session="a"
            ),
            policy_model.generate(
                [5] * 3, SamplingParams(max_generate_length=60, seed=1), session="b"
            ),
        ),
        timeout=20,
    )
    assert (len(long.token_ids), len(short.token_ids)) == (5, 60)


async def test_a_round_without_a_stop_string_is_decoded_once() -> None:
    decoded: list[int] = []

    def letters(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return "".join(chr(32 + token) for token in token_ids)

    policy_model = CudaEngine(
        small_decoder(), decode_text=letters, max_num_seqs=1, capacity=80, steps_per_round=8
    )
    sampling = SamplingParams(max_generate_length=33, seed=1, stop=("never completion",))
    completion = await policy_model.generate(PROMPT, sampling, session="s")
    assert (len(completion.token_ids), completion.finish) == (33, "length")
    # Four rounds of eight after the first token: all new tokens, then the end.
    assert len(decoded) <= 2 * 5
    assert max(decoded) <= len("never completion") + 4 + 8


def test_truncated_logits_keep_the_tokens_that_the_cpu_sampler_keeps() -> None:
    torch.manual_seed(0)
    logits_MV = torch.randn(5, 40)
    rows = [SamplingParams(temperature=0.7, top_p=p, top_k=k, min_p=m) for p, k, m in [
        (1.0, -1, 0.0), (0.5, -1, 0.0), (1.0, 3, 0.0), (1.0, -1, 0.3), (0.8, 10, 0.05),
    ]]  # fmt: skip
    cut_MV = truncate_logits(
        logits_MV,
        torch.tensor([1 / r.temperature for r in rows]),
        torch.tensor([r.top_p for r in rows]),
        torch.tensor([r.top_k for r in rows]),
        torch.tensor([r.min_p for r in rows]),
    )
    for row, sampling in enumerate(rows):
        sampled = {
            int(sample_tokens(logits_MV[row : row + 1], sampling, torch.tensor([u]))[0])
            for u in torch.linspace(0, 0.9999, 3000, dtype=torch.float64)
        }
        assert sampled <= set(cut_MV[row].isfinite().nonzero()[:, 0].tolist())
        assert len(sampled) >= 0.9 * int(cut_MV[row].isfinite().sum())
