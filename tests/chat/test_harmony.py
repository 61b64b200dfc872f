"""gpt-oss: parsing of its channels, valid or not."""

from __future__ import annotations

import pytest

from skyfleet.chat.harmony import render_harmony_tools
from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tool_calls.harmony import parse_harmony


def test_channels_become_reasoning_content_and_calls() -> None:
    parsed = parse_harmony(
        "<|channel|>analysis<|message|>Which one?<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
        '{"word": "heron"}<|call|>'
        '<|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{"now": true}'
    )
    assert parsed.reasoning == "Which one?"
    assert parsed.content == "I look."
    assert parsed.tool_calls == (
        ToolCall(id="functions.look_up:0", name="look_up", arguments={"word": "heron"}),
        ToolCall(id="functions.stop:1", name="stop", arguments={"now": True}),
    )
    assert parsed.malformed_calls == ()


def test_an_answer_is_content_with_and_without_its_end_token() -> None:
    for end in ("", "<|return|>"):
        parsed = parse_harmony(f"<|channel|>final<|message|>A bird.{end}")
        assert (parsed.content, parsed.reasoning) == ("A bird.", None)


def test_a_call_inside_reasoning_is_reasoning() -> None:
    parsed = parse_harmony('<|channel|>analysis<|message|>to=functions.x {"a": 1}')
    assert parsed.tool_calls == ()
    assert parsed.reasoning == 'to=functions.x {"a": 1}'


@pytest.mark.parametrize("body", ["", "[1]", '"{}"', '{"a": NaN}', '{"a": 1', "9" * 5000])
def test_a_call_whose_arguments_are_no_object_is_malformed(body: str) -> None:
    text = f" to=functions.x<|channel|>commentary json<|message|>{body}"
    parsed = parse_harmony(text)
    assert parsed.tool_calls == ()
    assert parsed.malformed_calls == (text,)


def test_a_call_cut_in_its_header_is_malformed() -> None:
    parsed = parse_harmony("<|channel|>commentary to=functions.x")
    assert parsed.malformed_calls == ("<|channel|>commentary to=functions.x",)


def test_text_outside_every_channel_is_content() -> None:
    assert parse_harmony("A bird.").content == "A bird."
    assert parse_harmony("").content == ""


def test_tools_are_rendered_as_typescript() -> None:
    move = ToolSpec(
        name="move",
        description="Moves a mail.",
        parameters={
            "properties": {
                "id": {"type": "integer", "description": "Whose."},
                "to": {"type": "string", "enum": ["inbox", "bin"], "default": "bin"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["id"],
        },
    )
    stop = ToolSpec(name="stop", description="Stops.", parameters={})
    assert render_harmony_tools([move, stop]) == (
        "## functions\n\nnamespace functions {\n\n"
        "// Moves a mail.\ntype move = (_: {\n// Whose.\nid: number,\n"
        'to?: "inbox" | "bin", // default: bin,\ntags?: string[],\n}) => any;\n\n'
        "// Stops.\ntype stop = () => any;\n\n} // namespace functions"
    )
