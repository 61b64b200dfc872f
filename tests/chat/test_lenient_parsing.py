"""Lenient parsing recovers calls, keeps strict ones, and never invents one from prose or code."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chat.prose_corpus import CODE, PROSE
from tests.chat.test_tool_call_fuzz import SHARDS, SOUP, mutated, some_calls, tools_of

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.tool_calls.formats import FORMATS
from skyfleet.chat.tool_calls.lenient import repair_message

SEARCH = ToolSpec(
    name="search",
    description="",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["query"],
    },
)
TOOLS = [SEARCH, ToolSpec(name="stop", description="", parameters={"type": "object"})]
CALL = '{"name": "search", "arguments": {"query": "a b", "limit": 3}}'
CUT = '{"name": "search", "arguments": {"limit": 3, "query": "a b"'


def parse(text: str, own: str = "hermes", tools: list[ToolSpec] = TOOLS) -> Message:
    return repair_message(FORMATS[own].parse(text, tools).message, tools)


def calls(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, dict(call.arguments)) for call in message.tool_calls]


FOUND = {"query": "a b", "limit": 3}


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (CALL, "bare JSON"),
        (f"I will search.\n{CALL}\n", "bare JSON"),
        (f"I will search.\n\n```json\n{CALL}\n```", "fenced JSON"),
        (f"```\n[{CALL}]\n```\n", "fenced JSON"),
        (json.dumps(json.loads(CALL), indent=2), "bare JSON"),
        (CALL[:-1], "truncated JSON"),
        (CALL[:-2] + ",", "truncated JSON"),
        (f"<tool_call>\n{CUT}\n", "truncated JSON"),
        (f"```json\n{CUT}", "truncated JSON"),
        (f"<tool_call>{CUT}\n```", "truncated JSON"),
        ("<tool_call>{'name': 'search', 'arguments': {'query': 'a b', 'limit': 3}}</tool_call>",
         "Python literal"),
        ("<tool_call>\nsearch\n<arg_key>query</arg_key><arg_value>a b</arg_value>"
         "<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>", "glm format"),
        ("<function=search><parameter=query>\na b\n</parameter><parameter=limit>\n3\n"
         "</parameter></function>", "qwen3_coder format"),
        ('[TOOL_CALLS]search[ARGS]{"query": "a b", "limit": 3}', "mistral format"),
        ('<|python_tag|>{"name": "search", "parameters": {"query": "a b", "limit": 3}}',
         "llama3_json format"),
        ("[search(query='a b', limit=3)]", "pythonic format"),
    ],
)  # fmt: skip
def test_a_call_is_recovered_and_marked_with_how(text: str, how: str) -> None:
    assert calls(FORMATS["hermes"].parse(text, TOOLS).message) == []
    message = parse(text)
    assert calls(message) == [("search", FOUND)]
    assert [call.repair for call in message.tool_calls] == [how]
    assert (message.repaired_calls, message.malformed_calls) == (1, ())
    assert message.content in ("", "I will search.")


@pytest.mark.parametrize("own", sorted(FORMATS.keys() - {"harmony"}))
@pytest.mark.parametrize("other", sorted(FORMATS.keys() - {"harmony", "json_object"}))
def test_a_call_in_any_other_format_is_recovered(own: str, other: str) -> None:
    call = ToolCall(id="call_0", name="search", arguments=FOUND)
    text = "".join(FORMATS[other].write([call]))
    assert calls(parse(text, own)) == [("search", FOUND)]


def test_line_breaks_inside_a_string_are_accepted() -> None:
    message = parse('<tool_call>{"name": "search", "arguments": {"query": "a\nb"}}</tool_call>')
    assert calls(message) == [("search", {"query": "a\nb"})]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{'name': 'delete', 'arguments': {}}</tool_call>",  # no such tool
        "<tool_call>{'name': 'search', 'arguments': {'q': 1}}</tool_call>",  # no such argument
        "<tool_call>{'name': 'search', 'arguments': {'limit': 3}}</tool_call>",  # one is missing
        '<tool_call>{"name": "search", "arguments": {"query": "a b',  # the value is cut
        '<tool_call>{"name": "search", "argum',
        f"<tool_call>{CALL[:-2]}",  # 3 may be the beginning of 30
        "<tool_call>{'name': 'search', 'arguments': {'query': 'a', 'limit': 3",
        # A key occurs twice: the decoders would keep the last one.
        '<tool_call>{"name": "search", "arguments": {"query": "a", "query": "b"',
        '<tool_call>{"name": "search", "arguments": {"query": "a", "query": "b"}}</tool_call>',
        "<tool_call>{'name': 'search', 'arguments': {'query': 'a', 'query': 'b'}}</tool_call>",
        "<tool_call>search the web</tool_call>",
    ],
)
def test_what_cannot_be_recovered_with_certainty_stays_malformed(text: str) -> None:
    message = parse(text)
    assert message.tool_calls == ()
    assert message.malformed_calls == (text,)


@pytest.mark.parametrize("end", ["false", "null", "[1]", "1,", '"x"'])
def test_a_call_that_is_cut_behind_a_whole_value_is_recovered(end: str) -> None:
    text = f'<tool_call>{{"name": "stop", "arguments": {{"now": {end}'
    assert calls(parse(text)) == [("stop", {"now": json.loads(end.rstrip(","))})]


def test_a_malformed_call_is_recovered_beside_a_good_one() -> None:
    good = f"<tool_call>{CALL}</tool_call>"
    message = parse(f"{good}\n<tool_call>{CALL[:-2]}</tool_call extra\n{good}")
    assert [call.repair for call in message.tool_calls][:1] == [""]
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)


def test_text_beside_a_call_is_not_searched() -> None:
    message = parse(f"<tool_call>{CALL}</tool_call>\n{CALL}")
    assert len(message.tool_calls) == 1


def test_json_that_the_text_goes_on_from_is_an_explanation() -> None:
    text = f"A call looks so:\n{CALL}\nShall I send it?"
    assert parse(text) == FORMATS["hermes"].parse(text, TOOLS).message


def test_nothing_is_recovered_without_offered_tools() -> None:
    assert parse(CALL, tools=[]).tool_calls == ()


def test_repairs_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    message = FORMATS["hermes"].parse(CALL, TOOLS).message
    with caplog.at_level(logging.INFO):
        repair_message(message, TOOLS)
        assert caplog.messages == []
        repair_message(message, TOOLS, log=True)
    assert caplog.messages == ["bare JSON: search({'query': 'a b', 'limit': 3})"]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(FORMATS)))
def test_strict_calls_are_kept_as_they_are(seed: int, name: str) -> None:
    """Also of texts that are damaged: lenient calls come behind the strict ones."""
    rng = random.Random(seed)
    written = some_calls(rng)
    text = "".join(FORMATS[name].write(written))
    if seed % 2:
        text = mutated(rng, text, SHARDS[name] + SOUP)
    tools = tools_of(written)
    strict = FORMATS[name].parse(text, tools).message
    lenient = repair_message(strict, tools)
    kept = lenient.tool_calls[: len(strict.tool_calls)]
    assert [replace(call, id="") for call in kept] == [
        replace(call, id="") for call in strict.tool_calls
    ]
    assert len(lenient.malformed_calls) <= len(strict.malformed_calls)


WORDS = ["a", "the", "search", "stop", "for", "of", "is", "for_each", "def", "return"]
PROSE_TOOLS = [
    *TOOLS,
    *(ToolSpec(name=n, description="", parameters={"type": "object"}) for n in ("print", "open", "get", "main")),
]  # fmt: skip


@pytest.mark.parametrize("text", [*PROSE, *CODE])
@pytest.mark.parametrize("own", sorted(FORMATS))
def test_no_call_is_invented_from_prose_or_code(own: str, text: str) -> None:
    """The corpus mentions the tools by name, and holds JSON, Python, XML and Markdown."""
    strict = FORMATS[own].parse(text, PROSE_TOOLS).message
    assert calls(repair_message(strict, PROSE_TOOLS)) == calls(strict)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([*WORDS, "{", "}", "[", "]", "(", ")", '"', ":", ",", "=", "\n", "```", " ", "1"]),
        max_size=60,
    )
)  # fmt: skip
def test_no_call_is_invented_from_random_code(pieces: list[str]) -> None:
    """Without the keys of a call there is no call, whatever brackets and names occur."""
    text = "".join(pieces)
    message = parse(text, tools=PROSE_TOOLS)
    assert all(call.repair == "pythonic format" for call in message.tool_calls)


@pytest.mark.parametrize("unit", ["{\n", "```\n{", "{'a':", '{"name": "search",\n', "<tool_call>{"])
def test_a_long_text_without_a_call_is_searched_to_its_end(unit: str) -> None:
    assert parse(unit * 4_000).tool_calls == ()
