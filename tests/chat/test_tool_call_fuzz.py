"""Every format parses any output or counts it as malformed, and never alters a valid call."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tool_calls.formats import FORMATS, get_parser

SHARDS = {
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "harmony": ["<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>", "<|return|>",
                "analysis", "commentary json", "final", " to=functions.f", " to="],
    "hermes": ["<tool_call>", "</tool_call>", "<function_call>", '{"name": "f"', ', "arguments": {'],
    "json_object": ["```json", "```", '{"name": "f"', ', "arguments": {', '"tool"'],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                "<|tool_call_end|>", "<|tool_call_argument_begin|>", "functions.f:0"],
    "llama3_json": ["<|python_tag|>", ";", '{"name": "f"', ', "parameters": {'],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", '[{"name": "f"', "f"],
    "pythonic": ["[f(", "a=", ")", "<|tool_call_start|>", "<|tool_call_end|>", "'", '"""', "\\d", "from="],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>"],
}  # fmt: skip
SOUP = ["<think>", "</think>", "<|", "{", "}", "[", "]", '"', ":", ",", " ", "\n", "\\", "a", "é",
        "1", "NaN", "1e999", "null", "\x00", "\ud800", "\\ud800", "9" * 5000, "[" * 300, "\r\n"]  # fmt: skip
VALUES: list[Any] = ["heron", "", " two\nlines ", "5", "true", '{"a": 1}', "<b>é</b>", "it's \"so\"",
          "[x](y) {z}", 0, -7, 1.5, True, None, [], [1, ["a", {}]], {"k": {"l": [None]}}]  # fmt: skip


def some_calls(rng: random.Random) -> list[ToolCall]:
    return [
        ToolCall(
            id=f"call_{i}",
            name=rng.choice(["look_up", "stop", "mail.send"]),
            # A key for each type: XML formats type an argument by its key.
            arguments={f"{type(v).__name__}_{n}": v for n, v in enumerate(rng.sample(VALUES, 3))},
        )
        for i in range(rng.randint(1, 3))
    ]


def tools_of(calls: list[ToolCall]) -> list[ToolSpec]:
    kinds: dict[str, Any] = {
        key: {"type": "string" if isinstance(value, str) else "object"}
        for call in calls
        for key, value in call.arguments.items()
    }
    names = {call.name for call in calls}
    return [ToolSpec(name=name, description="", parameters={"properties": kinds}) for name in names]


def mutated(rng: random.Random, text: str, shards: list[str]) -> str:
    for _ in range(rng.randint(1, 3)):
        start, stop = sorted(rng.randint(0, len(text)) for _ in range(2))
        change = rng.randrange(4)
        if change == 0:
            text = text[:start] + text[stop:]
        elif change == 1:
            text = text[:start] + rng.choice(shards) + text[start:]
        elif change == 2:
            text = text[:stop] + text[start:stop] + text[stop:]
        else:
            text = text[:start] + rng.choice(shards) + text[stop:]
    return text


def sampled(calls: list[ToolCall] | tuple[ToolCall, ...]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in calls]


def check_counted(name: str, text: str, tools: list[ToolSpec]) -> None:
    parsed = get_parser(name)(text, tools)
    for call in parsed.tool_calls:
        written = json.dumps([call.name, dict(call.arguments)], allow_nan=False, ensure_ascii=False)
        written.encode()
        assert json.loads(written) == [call.name, call.arguments]
    assert all(block and block in text for block in parsed.malformed_calls)
    assert parsed.repaired_calls <= len(parsed.tool_calls)
    assert len({call.id for call in parsed.tool_calls}) == len(parsed.tool_calls)


def fuzz(name: str, outputs: int) -> None:
    """A third each: mutated calls, cut calls and random text."""
    rng = random.Random(name)
    shards = SHARDS[name] + SOUP
    for i in range(outputs):
        if i % 3 == 0:
            check_counted(name, "".join(rng.choices(shards, k=rng.randint(1, 20))), [])
            continue
        calls = some_calls(rng)
        tools, text = tools_of(calls), "".join(FORMATS[name].write(calls))
        if i % 3 == 1:
            check_counted(name, mutated(rng, text, shards), tools)
            continue
        assert sampled(get_parser(name)(f"So.\n{text}", tools).tool_calls) == sampled(calls)
        cut = get_parser(name)(f"So.\n{text[: rng.randint(0, len(text))]}", tools)
        assert sampled(cut.tool_calls) == sampled(calls)[: len(cut.tool_calls)]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_no_output_makes_a_parser_raise_and_no_cut_alters_a_call(name: str) -> None:
    fuzz(name, 2000)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_hundred_thousand_outputs_make_no_parser_raise(name: str) -> None:
    fuzz(name, 100_000 // len(FORMATS))


WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
PLAIN = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
CALLS = st.lists(st.tuples(PLAIN, st.dictionaries(PLAIN, JSON, max_size=3)), max_size=3)


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=60, derandomize=True, deadline=None)
@given(CALLS)
def test_parsing_a_rendered_turn_restores_the_message(
    name: str, made: list[tuple[str, Any]]
) -> None:
    calls = [
        ToolCall(id=f"call_{i}", name=f"{tool}_{i}", arguments=arguments)
        for i, (tool, arguments) in enumerate(made)
    ]
    tools = [spec for call in calls for spec in tools_of([call])]
    written = "".join(FORMATS[name].write(calls)) if calls else ""
    parsed = get_parser(name)(written, tools)
    assert sampled(parsed.tool_calls) == sampled(calls)
    assert (parsed.content, parsed.malformed_calls, parsed.repaired_calls) == ("", (), 0)
