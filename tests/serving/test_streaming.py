"""The chunks of a streamed chat add up to the whole response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from tests.fakes.chars import CharRenderer
from tests.fakes.tiny_policy import tiny_policy

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.chat.transcript import Completion
from skyfleet.serving.generation import SLICE_TOKENS
from skyfleet.serving.requests import ChatCompletionRequest
from skyfleet.serving.responses import build_chat_message, stream_chat_choices

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 2}}\n</tool_call>'
OPENED_IN_PROMPT = "A thought of many letters.</think>\n\nThe answer is seven."
TEXTS = [
    "Words, and nothing else.  \n\n  ",
    "  if a < b and [c] then  \n\n  they are said as they are, all of them",
    "<think>\nA thought.\n</think>\n\nThe answer.",
    "<think>A thought that never ends",
    "First words. <think>A thought.</think> And then others.",
    f"\n\nwords before  {CALL}",
    f"words before  {CALL} and behind it, which are many",
    f"<think>A thought.</think>\n\nwords before {CALL}",
    f"words <tool_call>bad</tool_call> more words {CALL} and others",
    "Write <tool_call> around what you call, and no more than that.",
]
TOOL = {"type": "function", "function": {"name": "look"}}


class HermesChars(CharRenderer):
    """No tag is a single token: a slice may end inside one."""

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        return parse_hermes(self.text(token_ids)).message


CHARS = HermesChars()


async def slices(token_ids: Sequence[int], n: int) -> AsyncIterator[tuple[Completion, bool]]:
    for start in range(0, len(token_ids), n):
        sampled, is_last = tuple(token_ids[start : start + n]), start + n >= len(token_ids)
        finish: Any = "stop" if is_last else "length"
        logprobs = (-0.5,) * len(sampled)
        yield (
            Completion(token_ids=sampled, logprobs=logprobs, finish=finish, policy_version=0),
            is_last,
        )


async def deltas(
    body: ChatCompletionRequest,
    line: str,
    *,
    n: int,
    in_reasoning: bool,
    renderer: Renderer = CHARS,
) -> list[dict[str, Any]]:
    parts = slices(renderer.render_completion(Message(role="assistant", content=line)), n)
    choices = stream_chat_choices(body, renderer, parts, in_reasoning=in_reasoning)
    return [choice["delta"] async for _, choice in choices]


def build_request(**more: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user"}], **more}
    )


@pytest.mark.parametrize("n", [1, 3, SLICE_TOKENS, 1000])
@pytest.mark.parametrize(
    ("line", "in_reasoning"),
    [(OPENED_IN_PROMPT, True)]
    + [(line, in_reasoning) for line in TEXTS for in_reasoning in (True, False)],
)
@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"stop": "xyz"}])
async def test_the_deltas_of_a_stream_add_up_to_the_whole_response(
    line: str, in_reasoning: bool, n: int, more: dict[str, Any]
) -> None:
    body = build_request(**more)
    streamed = {"content": "", "reasoning_content": ""}
    for delta in await deltas(body, line, n=n, in_reasoning=in_reasoning):
        for key in streamed:
            streamed[key] += delta.get(key, "")
    whole = build_chat_message(
        body, CHARS, CHARS.render_completion(Message(role="assistant", content=line))
    )
    assert streamed == {key: whole.get(key) or "" for key in streamed}


async def test_content_and_reasoning_are_streamed_as_sampled() -> None:
    sampled = await deltas(
        build_request(), "A sentence of some length.", n=SLICE_TOKENS, in_reasoning=False
    )
    assert [delta.get("content") for delta in sampled] == ["A senten", "ce of so", "me lengt", "h."]
    line = "<think>A thought of some length.</think>Said."
    thought = await deltas(build_request(), line, n=SLICE_TOKENS, in_reasoning=True)
    assert sum("reasoning_content" in delta for delta in thought) > 2


async def test_a_partial_character_is_held_back() -> None:
    """Characters of several tokens, which slices cut."""
    line = "<think>\n猫猫猫猫猫猫\n</think>\n\nçàéèü, 猫猫猫猫猫猫."
    renderer = tiny_policy().renderer
    sampled = await deltas(
        build_request(), line, n=SLICE_TOKENS, in_reasoning=True, renderer=renderer
    )
    thought, comparable_fields = (
        [delta[key] for delta in sampled if delta.get(key)]
        for key in ("reasoning_content", "content")
    )
    assert ("".join(thought), "".join(comparable_fields)) == (
        "猫猫猫猫猫猫",
        "çàéèü, 猫猫猫猫猫猫.",
    )
    assert min(len(thought), len(comparable_fields)) > 1


async def test_reasoning_without_an_opening_tag_loses_no_answer() -> None:
    """The reasoning was streamed as content before its closing tag was sampled."""
    sampled = await deltas(build_request(), OPENED_IN_PROMPT, n=SLICE_TOKENS, in_reasoning=False)
    assert "".join(delta.get("content", "") for delta in sampled).endswith("The answer is seven.")
