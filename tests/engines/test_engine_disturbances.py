"""Cancellation, new weights and errors in the middle of a turn leave the engine whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tests.fakes.small_models import logprobs_of, small_decoder

from skyfleet.chat.transcript import Completion
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.models.decoder import Decoder

PROMPT = [(5 * i) % 59 for i in range(30)]
SAMPLING = SamplingParams(max_generate_length=20, seed=1)


def engine(decoder: Decoder | None = None, *, rows: int = 4) -> EmbeddedEngine:
    return EmbeddedEngine(
        decoder or small_decoder(), decode_text=str, max_num_seqs=rows, capacity=64
    )


async def begun(
    policy_model: EmbeddedEngine, session: str, *, n_steps: int = 5
) -> asyncio.Task[Completion]:
    """A turn that has been running for a few steps."""
    task = asyncio.create_task(policy_model.generate(PROMPT, SAMPLING, session=session))
    for _ in range(n_steps):
        await asyncio.sleep(0)
    return task


async def settled() -> set[asyncio.Task[Any]]:
    """Tasks other than this one that are still there once everybody had a chance to end."""
    for _ in range(5):
        await asyncio.sleep(0)
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_a_cancelled_turn_leaves_no_task_and_a_usable_engine() -> None:
    expected = await engine().generate(PROMPT, SAMPLING, session="s")
    policy_model = engine(rows=1)
    turn = await begun(policy_model, "cancelled")
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await policy_model.release("cancelled")
    assert await settled() == set()
    assert (await policy_model.generate(PROMPT, SAMPLING, session="s")) == expected


async def test_a_turn_cancelled_among_others_does_not_touch_them() -> None:
    expected = await engine().generate(PROMPT, SAMPLING, session="s")
    policy_model = engine()
    cancelled, kept = await begun(policy_model, "cancelled"), await begun(policy_model, "s")
    cancelled.cancel()
    await asyncio.sleep(0)
    await policy_model.release("cancelled")
    late = await begun(policy_model, "late")
    assert (await kept).token_ids == expected.token_ids
    assert len((await late).token_ids) == 20


async def test_new_weights_take_over_in_the_middle_of_a_turn() -> None:
    decoder, newer = small_decoder(seed=0), small_decoder(seed=1)
    older = small_decoder(seed=0)
    policy_model = engine(decoder)
    turn = await begun(policy_model, "s", n_steps=9)
    decoder.module.load_state_dict(newer.module.state_dict())
    policy_model.policy_version = 7
    completion = await turn
    assert completion.policy_version == 0  # the oldest decides how stale it is
    sequence = [*PROMPT, *completion.token_ids]
    before = logprobs_of(older, sequence, 20).tolist()
    after = logprobs_of(newer, sequence, 20).tolist()
    switch = next(
        i
        for i, said in enumerate(completion.logprobs)
        if said != pytest.approx(before[i], abs=1e-5)
    )
    assert 0 < switch < 20
    expected = before[:switch] + after[switch:]
    assert completion.logprobs == pytest.approx(expected, abs=1e-5)
    assert (await policy_model.generate(PROMPT, SAMPLING, session="next")).policy_version == 7


async def test_new_weights_drop_what_the_old_ones_computed() -> None:
    decoder, newer = small_decoder(seed=0), small_decoder(seed=1)
    policy_model = engine(decoder)
    await policy_model.generate(PROMPT, SAMPLING, session="s")
    decoder.module.load_state_dict(newer.module.state_dict())
    policy_model.policy_version = 1
    got = await policy_model.generate(PROMPT, SAMPLING, session="s")
    assert got.token_ids == (await engine(newer).generate(PROMPT, SAMPLING, session="s")).token_ids


async def test_sleeping_in_the_middle_of_a_turn_changes_nothing_it_says() -> None:
    expected = await asyncio.gather(
        *[engine().generate(PROMPT, SAMPLING, session=f"s{i}") for i in range(2)]
    )
    policy_model = engine(rows=2)
    first = await begun(policy_model, "s0")
    await policy_model.sleep()
    second = await begun(policy_model, "s1")
    got = await asyncio.gather(first, second)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


async def test_an_error_inside_a_step_reaches_everyone_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = small_decoder()
    policy_model = engine(decoder)
    turns = [await begun(policy_model, f"s{i}") for i in range(3)]

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(decoder, "hidden", broken)
    for outcome in await asyncio.gather(*turns, return_exceptions=True):
        assert isinstance(outcome, RuntimeError)
    assert await settled() == set()
    monkeypatch.undo()
    expected = await engine().generate(PROMPT, SAMPLING, session="s0")
    assert (
        await policy_model.generate(PROMPT, SAMPLING, session="s0")
    ).token_ids == expected.token_ids


async def test_releasing_a_session_nobody_knows_is_fine() -> None:
    policy_model = engine()
    await policy_model.release("nobody")
    expected = await engine().generate(PROMPT, SAMPLING, session="s0")
    assert await policy_model.generate(PROMPT, SAMPLING, session="s0") == expected
