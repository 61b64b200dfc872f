"""Hermes calls are parsed exactly or counted as malformed, and the parser never raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyfleet.chat.tool_calls.hermes import parse_hermes

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # A lone surrogate is no text; UTF-8 keeps hypothesis from drawing one.
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
TAGGED = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "<|", "}"])
ARGUMENTS = st.dictionaries(st.text("abc", max_size=3), JSON | TAGGED, max_size=3)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)
TAGS = ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>", "<think>", "</think>"]
PIECES = [
    '{"name": "x"',
    ', "arguments": ',
    '{"a": 1}',
    "{}",
    "}",
    "[",
    '"',
    "NaN",
    "<|",
    " ",
    "\n",
]
ODDITIES = ["\x00", "\ud800", "\\ud800", "9" * 5000, "[" * 20_000, '{"a":' * 20_000]
SHARDS = st.sampled_from([*TAGS, *PIECES, *ODDITIES])


def calls_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in parse_hermes(text).tool_calls]


def test_content_calls_and_reasoning_are_separated() -> None:
    parsed = parse_hermes(
        "<think>\nWhich one?\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "look_up", "arguments": {"word": "heron"}}\n</tool_call>\n'
        '<function_call>{"tool": "stop", "params": {"now": true}}</function_call> Done.'
    )
    assert parsed.reasoning == "Which one?"
    assert parsed.content == "I look.\nDone."
    assert [(call.id, call.name, call.arguments) for call in parsed.tool_calls] == [
        ("call_0", "look_up", {"word": "heron"}),
        ("call_1", "stop", {"now": True}),
    ]
    assert parsed.malformed_calls == ()


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "x"}', {}),
        ('{"name": "x", "arguments": {}}', {}),
        ('{"name": "x", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "x", "arguments": {"a": "\\u0000"}}', {"a": "\0"}),
        ('{"name": "x", "arguments": {"a": "</tool_call>"}}', {"a": "</tool_call>"}),
        ('{"name": "x", "arguments": {"a": "</think>"}}', {"a": "</think>"}),
    ],
)
def test_arguments_are_parsed_exactly(body: str, arguments: dict[str, Any]) -> None:
    assert calls_of(f"<tool_call>{body}</tool_call>") == [("x", arguments)]


@pytest.mark.parametrize("end", ["", "\n", "<|im_end|>"])
def test_the_closing_tag_may_be_missing_at_the_end_of_the_turn(end: str) -> None:
    assert calls_of('<tool_call>{"name": "x", "arguments": {"a": 1}}' + end) == [("x", {"a": 1})]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "look_up(heron)",
        '"look_up"',
        '[{"name": "x"}]',
        "null",
        '{"arguments": {}}',
        '{"name": ""}',
        '{"name": " "}',
        '{"name": 7}',
        '{"name": {"x": 1}}',
        '{"name": "x", "arguments": null}',
        '{"name": "x", "arguments": [1]}',
        '{"name": "x", "arguments": ""}',
        '{"name": "x", "arguments": "{\\"a\\": 1} and more"}',
        '{"name": "x", "arguments": {"a": 1, "a": 2}}',
        '{"name": "x", "arguments": {"a": {"b": 1, "b": 1}}}',
        '{"name": "x", "arguments": {}, "params": {}}',
        '{"name": "x", "arguments": {"a": NaN}}',
        '{"name": "x", "arguments": {"a": -Infinity}}',
        '{"name": "x", "arguments": {"a": 1e999}}',
        '{"name": "x", "arguments": {"a": "\\ud800"}}',
        '{"name": "x\\udfff"}',
        '{"name": "x", "arguments": {"a": "\x00"}}',
        '{"name": "x", "arguments": {"a": %s}}' % ("9" * 5000),
        '{"name": "x", "arguments": {"a": %s}}' % ("[" * 100_000 + "]" * 100_000),
        '{"name": "x"}}',
        '{"name": "x"} and more',
        '{"name": "x", "arguments": {"a": "b',
        '{"name": "x", "arguments": {"a": {"b": {"c": {',
    ],
)
def test_a_malformed_block_does_not_hide_a_later_call(body: str) -> None:
    block = f"<tool_call>{body}</tool_call>"
    parsed = parse_hermes(f'Now.{block}<tool_call>{{"name": "y"}}</tool_call>')
    assert parsed.malformed_calls == (block,)
    assert [call.name for call in parsed.tool_calls] == ["y"]
    assert parsed.content == "Now."


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_up_to_three_missing_braces_are_added_and_counted(missing: int) -> None:
    whole = '{"name": "x", "arguments": {"a": {"b": {"c": 1}}}}'
    parsed = parse_hermes(f"<tool_call>{whole[:-missing]}\n</tool_call>")
    assert [call.arguments for call in parsed.tool_calls] == [{"a": {"b": {"c": 1}}}]
    assert parsed.repaired_calls == 1


def test_missing_brackets_are_added_in_order() -> None:
    parsed = parse_hermes('<tool_call>{"name": "x", "arguments": {"a": [1</tool_call>')
    assert [call.arguments for call in parsed.tool_calls] == [{"a": [1]}]
    assert parsed.message.repaired_calls == 1


@pytest.mark.parametrize("end", ["", "\n", "<|im_end|>"])
def test_a_turn_cut_behind_complete_arguments_is_repaired(end: str) -> None:
    parsed = parse_hermes('<tool_call>{"name": "x", "arguments": {"a": {"b": 1}}' + end)
    assert [call.arguments for call in parsed.tool_calls] == [{"a": {"b": 1}}]
    assert parsed.repaired_calls == 1


@pytest.mark.parametrize(
    "cut",
    ['{"name": "x", "arguments": {"a": {"b": 1}', '{"name": "x", "extra": {}', '{"name": "x"'],
)
def test_a_turn_cut_inside_its_arguments_is_not_repaired(cut: str) -> None:
    assert parse_hermes(f"<tool_call>{cut}").malformed_calls == (f"<tool_call>{cut}",)


def test_four_missing_braces_are_too_many() -> None:
    text = '<tool_call>{"name": "x", "arguments": {"a": {"b": {"c": 1</tool_call>'
    assert parse_hermes(text).malformed_calls == (text,)


def test_a_call_that_may_have_been_cut_is_not_completed() -> None:
    cut = '<tool_call>{"name": "send", "arguments": {"to": "a"'
    parsed = parse_hermes(cut)
    assert parsed.tool_calls == ()
    assert parsed.malformed_calls == (cut,)


@pytest.mark.parametrize("between", ["", "\n", "<think>Next.</think>"])
def test_a_complete_call_ends_where_the_next_begins(between: str) -> None:
    parsed = parse_hermes(
        f'<tool_call>{{"name": "x"}}{between}<tool_call>{{"name": "y"}}</tool_call>'
    )
    assert [call.name for call in parsed.tool_calls] == ["x", "y"]
    assert (parsed.malformed_calls, parsed.repaired_calls) == ((), 0)


def test_an_unclosed_block_ends_where_the_next_begins() -> None:
    parsed = parse_hermes('<tool_call>{"name": "x", <tool_call>{"name": "y"}</tool_call>')
    assert parsed.malformed_calls == ('<tool_call>{"name": "x", ',)
    assert [call.name for call in parsed.tool_calls] == ["y"]


CALL = '<tool_call>{"name": "x"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        (f"<think>{CALL}</think>", CALL),
        (f"<think>Perhaps {CALL}", f"Perhaps {CALL}"),
        (f"Perhaps {CALL}</think>", f"Perhaps {CALL}"),
        ("Perhaps <tool_call> or not</think>", "Perhaps <tool_call> or not"),
        ("<think>\n\n</think>\n\n", ""),
        ("<think>a</think><think>b</think>", "a\nb"),
    ],
)
def test_reasoning_contains_neither_calls_nor_content(text: str, reasoning: str) -> None:
    parsed = parse_hermes(text)
    assert parsed.reasoning == reasoning
    assert (parsed.content, parsed.tool_calls, parsed.malformed_calls) == ("", (), ())


def test_text_after_reasoning_is_content() -> None:
    for text in (f"<think>{CALL}</think>{CALL}", f"{CALL}</think>{CALL}", f"{CALL}<think>{CALL}"):
        assert len(parse_hermes(text).tool_calls) == 1, text


def test_a_stray_closing_tag_after_reasoning_removes_no_call() -> None:
    assert len(parse_hermes(f"<think>a</think>{CALL}</think>").tool_calls) == 1


def test_empty_text_parses_to_an_empty_turn() -> None:
    parsed = parse_hermes("")
    assert (parsed.content, parsed.reasoning, parsed.tool_calls) == ("", None, ())


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3), st.sampled_from(["", "\n", "So. "]))
def test_a_valid_call_is_never_altered(calls: list[tuple[str, Any]], between: str) -> None:
    blocks = [
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=ascii)}"
        "</tool_call>"
        for (name, arguments), ascii in zip(calls, [True, False, True], strict=False)
    ]
    assert calls_of(between.join(blocks)) == calls


@settings(max_examples=500, derandomize=True, deadline=None)
@given(st.lists(SHARDS | st.text(max_size=5), max_size=12).map("".join))
def test_any_text_parses_or_counts_as_malformed(text: str) -> None:
    parsed = parse_hermes(text)
    for call in parsed.tool_calls:
        assert call.name.strip()
        assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
    assert all(block in text for block in parsed.malformed_calls)
    if "think>" not in text and not parsed.tool_calls:
        opened = text.count("<tool_call>") + text.count("<function_call>")
        assert len(parsed.malformed_calls) == opened
