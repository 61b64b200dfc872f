"""Which keys the messages and tools of a chat request may have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.serving.requests import ApiError, ChatCompletionRequest, parse_request

HI = {"role": "user", "content": "hi"}


def read(**more: Any) -> ChatCompletionRequest:
    raw = json.dumps({"model": "m", "messages": [HI], **more}).encode()
    return parse_request(raw, ChatCompletionRequest, template_kwargs={})


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"messages": [HI | {"name": "bob"}]}, "name='bob' of a user message is not supported"),
        (
            {"messages": [{"role": "assistant", "function_call": {}}]},
            r"messages\.0\.function_call={}",
        ),
        ({"messages": [HI | {"content": [{"type": "text", "text": "", "x": 1}]}]}, "'x': 1"),
        ({"tools": [{"function": {"name": "look", "returns": {}}}]}, r"function\.returns={}"),
        ({"tools": [{"function": {"name": "look"}, "allowed": True}]}, r"tools\.0\.allowed=True"),
    ],
)
def test_unknown_keys_are_rejected_by_name(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(ApiError, match=expected):
        read(**more)


def test_keys_that_clients_add_have_no_effect() -> None:
    nothing: dict[str, Any] = {"refusal": None, "audio": None, "function_call": None}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    text = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    body = read(
        messages=[
            {"role": "user", "content": [text], "name": None},
            {"role": "assistant", "tool_calls": [call], "name": "me", "annotations": [], **nothing}
            | {"provider_specific_fields": {"refusal": None}, "thinking_blocks": []},
            {"role": "tool", "content": "7", "tool_call_id": "1", "name": "look"},
        ],
        tools=[{"type": "function", "function": {"name": "look", "strict": True}}],
    )
    assert [sampled.to_message() for sampled in body.messages] == [
        Message(role="user", content="hi"),
        Message(role="assistant", tool_calls=(ToolCall(id="1", name="look", arguments={}),)),
        Message(role="tool", content="7", tool_call_id="1"),
    ]
    parameters = {"type": "object", "properties": {}}
    assert body.tool_specs == (ToolSpec(name="look", description="", parameters=parameters),)
