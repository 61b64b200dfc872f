"""Replies of OpenAI-compatible servers are parsed, including malformed ones."""

from __future__ import annotations

from typing import Any

import pytest

from skyfleet.engines.openai_messages import parse_openai_message


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "9", "type": "function", "function": {"name": "look", "arguments": arguments}}


@pytest.mark.parametrize(
    "arguments",
    ['{"at"', "[1]", "[" * 200_000, '{"at": NaN}', {"at": float("nan")}, r'{"at": "\ud800"}', None],
)
def test_a_call_that_does_not_parse_is_kept_as_malformed(arguments: Any) -> None:
    message = parse_openai_message({"content": "so", "tool_calls": [call(arguments), call("{}")]})
    assert [call.arguments for call in message.tool_calls] == [{}]
    assert len(message.malformed_calls) == 1
    assert message.text == "so"


def test_calls_with_duplicate_ids_get_new_ids() -> None:
    message = parse_openai_message({"tool_calls": [call("{}"), call(""), call({"at": 2})]})
    assert [call.arguments for call in message.tool_calls] == [{}, {}, {"at": 2}]
    assert len({call.id for call in message.tool_calls}) == 3


@pytest.mark.parametrize(
    ("content", "text", "reasoning"),
    [
        (
            "<think>\nThen I say <done>.\n</think>\n\nOne moment.",
            "One moment.",
            "Then I say <done>.",
        ),
        ("Then I say <done>.\n</think>\n\nOne moment.", "One moment.", "Then I say <done>."),
        ("<think>[done]", "", "[done]"),
        (" as it is ", " as it is ", None),
        ("Write <think> around it.", "Write <think> around it.", None),
        (
            "Sure. <think>I am not <done> yet</think> Let me.",
            "Sure.\nLet me.",
            "I am not <done> yet",
        ),
        ("<think>Hm</think> Write <think> around it.", "Write <think> around it.", "Hm"),
        ("<think>a</think><think>[done]", "", "a\n[done]"),
    ],
)
def test_reasoning_in_the_content_is_separated(
    content: str, text: str, reasoning: str | None
) -> None:
    message = parse_openai_message({"content": content})
    assert (message.text, message.reasoning) == (text, reasoning)


@pytest.mark.parametrize(
    ("content", "text", "reasoning"),
    [
        (
            [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}], "closed": True},
                {"type": "text", "text": "One "},
                {"type": "reference", "reference_ids": [1]},
                {"type": "text", "text": "moment."},
            ],
            "One moment.",
            "hm",
        ),
        ([{"type": "text", "text": "<think>hm</think>Hi."}], "Hi.", "hm"),
        ([{"type": "thinking", "thinking": "hm"}], "", "hm"),
        ([1, {"type": "text"}, {"type": "text", "text": None}], "", None),
        (7, "", None),
    ],
)
def test_content_chunks_become_one_text_and_one_reasoning(
    content: Any, text: str, reasoning: str | None
) -> None:
    message = parse_openai_message(
        {"content": content, "reasoning": {"effort": "low"}, "tool_calls": 7}
    )
    assert (message.content, message.reasoning, message.tool_calls) == (text, reasoning, ())
