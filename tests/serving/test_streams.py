"""A streamed chat: its parts, joined, are the answer in one piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from tests.fakes.chars import CharRenderer
from tests.fakes.tiny_speaker import tiny_speaker

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.chat.transcript import Completion
from skyfleet.serving.model_service import SLICE_TOKENS
from skyfleet.serving.requests import ChatCompletionRequest
from skyfleet.serving.responses import stream_chat_choices, build_chat_message

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 2}}\n</tool_call>'
BEGUN_IN_THE_PROMPT = "A thought of many letters.</think>\n\nThe answer is seven."
LINES = [
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
    """No mark is a token: a slice may end within one."""

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        return parse_hermes(self.text(token_ids)).message


CHARS = HermesChars()


async def slices(token_ids: Sequence[int], n: int) -> AsyncIterator[tuple[Completion, bool]]:
    for start in range(0, len(token_ids), n):
        said, is_last = tuple(token_ids[start : start + n]), start + n >= len(token_ids)
        finish: Any = "stop" if is_last else "length"
        logprobs = (-0.5,) * len(said)
        yield (
            Completion(token_ids=said, logprobs=logprobs, finish=finish, policy_version=0),
            is_last,
        )


async def deltas(
    body: ChatCompletionRequest, line: str, *, n: int, in_reasoning: bool, renderer: Renderer = CHARS
) -> list[dict[str, Any]]:
    parts = slices(renderer.write(Message(role="assistant", content=line)), n)
    choices = stream_chat_choices(body, renderer, parts, in_reasoning=in_reasoning)
    return [choice["delta"] async for _, choice in choices]


def asked(**more: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user"}], **more})


@pytest.mark.parametrize("n", [1, 3, SLICE_TOKENS, 1000])
@pytest.mark.parametrize(
    ("line", "thinks"),
    [(BEGUN_IN_THE_PROMPT, True)] + [(line, in_reasoning) for line in LINES for in_reasoning in (True, False)],
)
@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"stop": "xyz"}])
async def test_a_stream_says_what_the_whole_answer_says(
    line: str, in_reasoning: bool, n: int, more: dict[str, Any]
) -> None:
    body = asked(**more)
    streamed = {"content": "", "reasoning_content": ""}
    for delta in await deltas(body, line, n=n, in_reasoning=in_reasoning):
        for key in streamed:
            streamed[key] += delta.get(key, "")
    whole = build_chat_message(body, CHARS, CHARS.write(Message(role="assistant", content=line)))
    assert streamed == {key: whole.get(key) or "" for key in streamed}


async def test_words_and_thoughts_are_sent_as_they_are_said() -> None:
    said = await deltas(asked(), "A sentence of some length.", n=SLICE_TOKENS, in_reasoning=False)
    assert [delta.get("content") for delta in said] == ["A senten", "ce of so", "me lengt", "h."]
    line = "<think>A thought of some length.</think>Said."
    thought = await deltas(asked(), line, n=SLICE_TOKENS, in_reasoning=True)
    assert sum("reasoning_content" in delta for delta in thought) > 2


async def test_half_a_letter_waits_for_the_rest() -> None:
    """A letter of several tokens, which slices cut."""
    line = "<think>\n猫猫猫猫猫猫\n</think>\n\nçàéèü, 猫猫猫猫猫猫."
    renderer = tiny_speaker().renderer
    said = await deltas(asked(), line, n=SLICE_TOKENS, in_reasoning=True, renderer=renderer)
    thought, comparable_fields = (
        [delta[key] for delta in said if delta.get(key)] for key in ("reasoning_content", "content")
    )
    assert ("".join(thought), "".join(comparable_fields)) == ("猫猫猫猫猫猫", "çàéèü, 猫猫猫猫猫猫.")
    assert min(len(thought), len(comparable_fields)) > 1


async def test_a_thought_without_its_first_mark_costs_no_answer() -> None:
    """Where the model has no mark of its own for thoughts, they were sent before they were known."""
    said = await deltas(asked(), BEGUN_IN_THE_PROMPT, n=SLICE_TOKENS, in_reasoning=False)
    assert "".join(delta.get("content", "") for delta in said).endswith("The answer is seven.")
