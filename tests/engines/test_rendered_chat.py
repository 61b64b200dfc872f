"""Any engine speaks in messages and tools, and its very tokens go on from turn to turn."""

from __future__ import annotations

import pytest
from tests.engines.test_router import Recorded
from tests.fakes.small_models import logprobs_of
from tests.fakes.tiny_speaker import CAPACITY, tiny_speaker

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.chat_engine import RenderedChat
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ContextFullError, EngineError

SAMPLING = SamplingParams(max_generate_length=9, temperature=1.5, seed=3)
HI, ON = Message(role="user", content="hi"), Message(role="user", content="go on")
TOOL = ToolSpec(name="look_up", description="a word", parameters={"type": "object"})


def chatting(*, max_input_length: int = CAPACITY) -> RenderedChat:
    policy_model = tiny_speaker()
    return RenderedChat(
        policy_model.engine(), policy_model.renderer, max_input_length=max_input_length
    )


async def test_a_conversation_goes_on_from_the_tokens_that_were_sampled() -> None:
    chat, talk = chatting(), [HI]
    before: tuple[int, ...] = ()
    for _ in range(3):
        spoken = await chat.chat(talk, (), SAMPLING, session="s")
        assert spoken.prompt_token_ids[: len(before)] == before
        before = spoken.prompt_token_ids + spoken.completion.token_ids
        own = logprobs_of(
            tiny_speaker().decoder, before, len(spoken.completion.token_ids), temperature=1.5
        )
        assert spoken.completion.logprobs == pytest.approx(own.tolist(), abs=1e-5)
        talk = [*talk, spoken.message, ON]


async def test_tools_stand_in_the_prompt_and_stop_tokens_are_the_models() -> None:
    renderer = tiny_speaker().renderer
    chat = chatting()
    spoken = await chat.chat([HI], [TOOL], SAMPLING, session="s")
    assert list(spoken.prompt_token_ids) == renderer.open([HI], [TOOL])
    assert "look_up" in renderer.text(spoken.prompt_token_ids)
    assert spoken.message == renderer.parse(spoken.completion.token_ids, [TOOL])


async def test_a_past_that_was_changed_is_rendered_anew() -> None:
    chat = chatting()
    spoken = await chat.chat([HI], (), SAMPLING, session="s")
    other = [HI, Message(role="assistant", content="something else"), ON]
    again = await chat.chat(other, (), SAMPLING, session="s")
    assert list(again.prompt_token_ids) == tiny_speaker().renderer.open(other, ())
    with_tool = await chat.chat([*other, again.message, ON], [TOOL], SAMPLING, session="s")
    assert "look_up" in tiny_speaker().renderer.text(with_tool.prompt_token_ids)
    assert spoken.completion.token_ids


async def test_sessions_do_not_hear_each_other_and_end() -> None:
    chat = chatting()
    one = await chat.chat([HI], (), SAMPLING, session="one")
    await chat.chat([ON], (), SAMPLING, session="two")
    await chat.release("one")
    again = await chat.chat([HI], (), SAMPLING, session="one")
    assert again.completion == one.completion


async def test_a_prompt_beyond_the_limit_is_never_sampled_from() -> None:
    chat = chatting(max_input_length=3)
    with pytest.raises(ContextFullError, match=r"generator\.max_input_length=3"):
        await chat.chat([HI], (), SAMPLING, session="s")


async def test_its_version_is_the_engines() -> None:
    chat = chatting()
    chat.policy_version = 4
    spoken = await chat.chat([HI], (), SAMPLING, session="s")
    assert (chat.policy_version, spoken.completion.policy_version) == (4, 4)


async def test_a_turn_broken_off_is_half_a_message_and_none() -> None:
    breaking = Recorded(finishes=["abort"])
    chat = RenderedChat(breaking, tiny_speaker().renderer, max_input_length=CAPACITY)
    with pytest.raises(EngineError, match="session s: the engine broke the turn off"):
        await chat.chat([HI], (), SAMPLING, session="s")
