"""Any engine can chat with messages and tools, and its exact tokens are kept from turn to turn."""

from __future__ import annotations

import pytest
from tests.engines.test_engine_pool import Recorded
from tests.fakes.small_models import logprobs_of
from tests.fakes.tiny_policy import CAPACITY, tiny_policy

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.chat_engine import RenderedChat
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ContextFullError, EngineError

SAMPLING = SamplingParams(max_generate_length=9, temperature=1.5, seed=3)
HI, ON = Message(role="user", content="hi"), Message(role="user", content="go on")
TOOL = ToolSpec(name="look_up", description="a word", parameters={"type": "object"})


def chatting(*, max_input_length: int = CAPACITY) -> RenderedChat:
    policy_model = tiny_policy()
    return RenderedChat(
        policy_model.engine(), policy_model.renderer, max_input_length=max_input_length
    )


async def test_a_conversation_continues_from_the_sampled_tokens() -> None:
    chat, talk = chatting(), [HI]
    before: tuple[int, ...] = ()
    for _ in range(3):
        reply = await chat.chat(talk, (), SAMPLING, session="s")
        assert reply.prompt_token_ids[: len(before)] == before
        before = reply.prompt_token_ids + reply.completion.token_ids
        own = logprobs_of(
            tiny_policy().decoder, before, len(reply.completion.token_ids), temperature=1.5
        )
        assert reply.completion.logprobs == pytest.approx(own.tolist(), abs=1e-5)
        talk = [*talk, reply.message, ON]


async def test_tools_are_rendered_and_the_reply_is_parsed() -> None:
    renderer = tiny_policy().renderer
    chat = chatting()
    reply = await chat.chat([HI], [TOOL], SAMPLING, session="s")
    assert list(reply.prompt_token_ids) == renderer.render_prompt([HI], [TOOL])
    assert "look_up" in renderer.text(reply.prompt_token_ids)
    assert reply.message == renderer.parse(reply.completion.token_ids, [TOOL])


async def test_a_changed_history_is_rendered_again() -> None:
    chat = chatting()
    reply = await chat.chat([HI], (), SAMPLING, session="s")
    other = [HI, Message(role="assistant", content="something else"), ON]
    again = await chat.chat(other, (), SAMPLING, session="s")
    assert list(again.prompt_token_ids) == tiny_policy().renderer.render_prompt(other, ())
    with_tool = await chat.chat([*other, again.message, ON], [TOOL], SAMPLING, session="s")
    assert "look_up" in tiny_policy().renderer.text(with_tool.prompt_token_ids)
    assert reply.completion.token_ids


async def test_sessions_are_independent_and_can_be_released() -> None:
    chat = chatting()
    one = await chat.chat([HI], (), SAMPLING, session="one")
    await chat.chat([ON], (), SAMPLING, session="two")
    await chat.release("one")
    again = await chat.chat([HI], (), SAMPLING, session="one")
    assert again.completion == one.completion


async def test_a_prompt_beyond_the_limit_raises_context_full() -> None:
    chat = chatting(max_input_length=3)
    with pytest.raises(ContextFullError, match=r"generator\.max_input_length=3"):
        await chat.chat([HI], (), SAMPLING, session="s")


async def test_the_policy_version_is_the_engines() -> None:
    chat = chatting()
    chat.policy_version = 4
    reply = await chat.chat([HI], (), SAMPLING, session="s")
    assert (chat.policy_version, reply.completion.policy_version) == (4, 4)


async def test_an_aborted_turn_is_an_engine_error() -> None:
    aborting = Recorded(finishes=["abort"])
    chat = RenderedChat(aborting, tiny_policy().renderer, max_input_length=CAPACITY)
    with pytest.raises(EngineError, match="session s: the engine aborted the turn"):
        await chat.chat([HI], (), SAMPLING, session="s")
