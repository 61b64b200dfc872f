"""Weights that arrive inside a turn: each token has the version and the logprob it was sampled with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from tests.fakes.small_models import logprobs_of, small_decoder

from skyfleet.chat.transcript import Completion, Transcript
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.models.decoder import Decoder
from skyfleet.trajectories.records import _transcript, _transcript_record

PROMPT = [(5 * i) % 59 for i in range(40)]
SAMPLING = SamplingParams(max_generate_length=20, seed=1)
Make = Callable[[Decoder, bool], "EmbeddedEngine | CudaEngine"]


def make_embedded(decoder: Decoder, keeps_cache: bool) -> EmbeddedEngine:
    return EmbeddedEngine(
        decoder, decode_text=str, max_num_seqs=4, capacity=128, keeps_cache=keeps_cache
    )


def make_cuda(decoder: Decoder, keeps_cache: bool) -> CudaEngine:
    return CudaEngine(
        decoder,
        decode_text=str,
        max_num_seqs=4,
        capacity=128,
        steps_per_round=2,
        keeps_cache=keeps_cache,
    )


def perturb(decoder: Decoder) -> None:
    with torch.no_grad():
        for parameter in decoder.module.parameters():
            parameter.mul_(1.5)


async def sample_over_update(engine: EmbeddedEngine | CudaEngine, session: str) -> Completion:
    """A turn during which version 1 arrives."""
    turn = asyncio.create_task(engine.generate(PROMPT, SAMPLING, session=session))
    while engine.tokens_computed < len(PROMPT) + 4:  # noqa: ASYNC110 - the engine has no event
        await asyncio.sleep(0)
    perturb(engine.decoder)
    engine.policy_version = 1
    return await turn


@pytest.mark.parametrize("make", [make_embedded, make_cuda])
@pytest.mark.parametrize("keeps_cache", [False, True])
async def test_each_token_has_its_version_and_its_own_logprob(
    make: Make, keeps_cache: bool
) -> None:
    engine = make(small_decoder(), keeps_cache)
    old = small_decoder()
    completion = await sample_over_update(engine, "s")
    assert completion.policy_version == 0
    ((at, version),) = completion.version_changes
    assert version == 1
    assert 0 < at < 20
    whole = [*PROMPT, *completion.token_ids]
    before = logprobs_of(old, whole, 20, temperature=1.0).tolist()
    after = logprobs_of(engine.decoder, whole, 20, temperature=1.0).tolist()
    assert completion.logprobs[:at] == pytest.approx(before[:at], abs=1e-4)
    is_recomputed = completion.logprobs[at:] == pytest.approx(after[at:], abs=1e-4)
    assert is_recomputed is not keeps_cache, "a kept cache holds what the old weights computed"


@pytest.mark.parametrize("make", [make_embedded, make_cuda])
@pytest.mark.parametrize("keeps_cache", [False, True])
async def test_a_new_session_uses_nothing_that_older_weights_computed(
    make: Make, keeps_cache: bool
) -> None:
    engine = make(small_decoder(), keeps_cache)
    await sample_over_update(engine, "open")  # not released: its cache is kept or dropped
    fresh = await engine.generate(PROMPT, SAMPLING, session="new")
    assert fresh.version_changes == ()
    assert fresh.policy_version == 1
    whole = [*PROMPT, *fresh.token_ids]
    expected = logprobs_of(engine.decoder, whole, 20, temperature=1.0).tolist()
    assert fresh.logprobs == pytest.approx(expected, abs=1e-4)
    computed = engine.tokens_computed
    more = [*PROMPT, *fresh.token_ids, 1, 2]
    await engine.generate(more, SAMPLING, session="new")
    assert engine.tokens_computed - computed < len(more) + 19, "its own prefix is cached"


def test_a_transcript_counts_tokens_by_version_and_its_record_keeps_them() -> None:
    transcript = Transcript()
    transcript.append_prompt([1, 2])
    transcript.append_completion(
        Completion(
            token_ids=(3, 4, 5),
            logprobs=(-1.0, -1.0, -1.0),
            finish="stop",
            policy_version=4,
            version_changes=((1, 5), (2, 7)),
        )
    )
    transcript.append_prompt([6])
    transcript.append_completion(
        Completion(token_ids=(7, 8), logprobs=(-1.0, -1.0), finish="stop", policy_version=7)
    )
    assert transcript.count_tokens_by_version() == {4: 1, 5: 1, 7: 3}
    assert transcript.version_changes == [(3, 5), (4, 7)]
    assert _transcript(_transcript_record(transcript)) == transcript
    plain = Transcript()
    plain.append_prompt([1])
    assert "version_changes" not in _transcript_record(plain), (
        "synchronous runs write the same bytes"
    )
