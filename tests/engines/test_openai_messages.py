"""What servers of OpenAI's API say, however oddly, is a message."""

from __future__ import annotations

from typing import Any

import pytest

from skyfleet.engines.openai_messages import read_reply


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "9", "type": "function", "function": {"name": "look", "arguments": arguments}}


@pytest.mark.parametrize(
    "arguments",
    ['{"at"', "[1]", "[" * 200_000, '{"at": NaN}', {"at": float("nan")}, r'{"at": "\ud800"}', None],
)
def test_a_call_that_does_not_parse_is_kept(arguments: Any) -> None:
    message = read_reply({"content": "so", "tool_calls": [call(arguments), call("{}")]})
    assert [call.arguments for call in message.tool_calls] == [{}]
    assert len(message.malformed_calls) == 1
    assert message.text == "so"


def test_calls_with_one_id_are_counted_anew() -> None:
    message = read_reply({"tool_calls": [call("{}"), call(""), call({"at": 2})]})
    assert [call.arguments for call in message.tool_calls] == [{}, {}, {"at": 2}]
    assert len({call.id for call in message.tool_calls}) == 3


@pytest.mark.parametrize(
    ("content", "text", "thought"),
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
def test_thoughts_that_a_server_left_in_what_is_said_are_not_said(
    content: str, text: str, thought: str | None
) -> None:
    message = read_reply({"content": content})
    assert (message.text, message.reasoning) == (text, thought)


@pytest.mark.parametrize(
    ("content", "text", "thought"),
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
def test_a_content_in_chunks_is_one_text_and_one_thought(
    content: Any, text: str, thought: str | None
) -> None:
    message = read_reply({"content": content, "reasoning": {"effort": "low"}, "tool_calls": 7})
    assert (message.content, message.reasoning, message.tool_calls) == (text, thought, ())
