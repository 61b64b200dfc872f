"""No tool-call parser does more than linear work, whatever the model writes.

Work is counted in characters: those that patterns pass over, that strings are searched or counted
for, and that slices copy, from which JSON is decoded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, SupportsIndex

import pytest
from tests.chat.test_tool_call_fuzz import SHARDS, SOUP

from skyfleet.chat.tool_calls.formats import FORMATS

MODULES = [
    import_module(f"skyfleet.chat.tool_calls.{name}")
    for name in (*FORMATS.keys() - {"json_object"}, "parser", "strict_json")
]
LENGTH = 10_000
"""Long enough that the limit of open brackets (200) has its effect in both texts."""


class Work:
    n_characters = 0


class CountingText(str):
    """Counts what is searched, counted and copied of it."""

    work: Work

    def find(self, *args: Any) -> int:
        at = super().find(*args)
        start = args[1] if len(args) > 1 else 0
        self.work.n_characters += (at if at >= 0 else len(self)) - start
        return at

    def rfind(self, *args: Any) -> int:
        self.work.n_characters += len(self)
        return super().rfind(*args)

    def count(self, *args: Any) -> int:
        self.work.n_characters += (args[2] if len(args) > 2 else len(self)) - sum(args[1:2])
        return super().count(*args)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        found = super().__getitem__(key)
        self.work.n_characters += len(found)
        return found


class CountingPattern:
    """Counts the characters that a pattern passes over."""

    def __init__(self, pattern: re.Pattern[str], work: Work) -> None:
        self._pattern, self._work = pattern, work

    def search(self, text: str, position: int = 0) -> re.Match[str] | None:
        found = self._pattern.search(text, position)
        self._work.n_characters += (found.end() if found else len(text)) - position
        return found

    def match(self, text: str, position: int = 0) -> re.Match[str] | None:
        found = self._pattern.match(text, position)
        self._work.n_characters += found.end() - position if found else 1
        return found

    def finditer(self, text: str, position: int = 0) -> Iterator[re.Match[str]]:
        for found in self._pattern.finditer(text, position):
            self._work.n_characters += found.end() - position
            position = found.end()
            yield found
        self._work.n_characters += len(text) - position

    def sub(self, replacement: Any, text: str) -> str:
        self._work.n_characters += len(text)
        return self._pattern.sub(replacement, text)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted = Work()
    for module in MODULES:
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(module, name, CountingPattern(value, counted))
    return counted


def measure(work: Work, name: str, unit: str, length: int) -> int:
    text = CountingText((unit * (length // len(unit) + 1))[:length])
    text.work = work
    work.n_characters = 0
    FORMATS[name].parse(text)
    return work.n_characters


def check_linear(
    work: Work, name: str, unit: str, length: int = LENGTH, *, constant: int = 2_000
) -> None:
    once, twice = (measure(work, name, unit, n * length) for n in (1, 2))
    assert twice <= 2.6 * once + constant, f"{name} {unit!r}: {once:,} then {twice:,} characters"


WORST = [
    ("json_object", "{\n"), ("llama3_json", "{\n"), ("json_object", '{"a" '), ("llama3_json", "{x"),
    ("llama3_json", '{"a":['),
    ("llama3_json", '<|python_tag|>{"'), ("hermes", "<tool_call>\n"), ("hermes", "<tool_call>{"),
    ("hermes", '<tool_call>["<tool_call>", "'), ("hermes", '<tool_call>{"a": 1'),
    ("glm", "<tool_call>f<arg_key>k</arg_key><arg_value>v"),
    ("qwen3_coder", "<function=f><parameter=k>v"), ("qwen3_coder", "<tool_call>   "),
    ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"), ("kimi_k2", ":1"),
    ("mistral", "[TOOL_CALLS]f{"), ("mistral", "[TOOL_CALLS][{"), ("mistral", "[TOOL_CALLS]"),
    ("pythonic", "[f("), ("pythonic", '[f(a="<|"'), ("pythonic", "[f(a='''"),
    ("harmony", "<|message|>"), ("harmony", "to=<|"), ("hermes", "</think>"), ("hermes", "<think>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "unit"), WORST)
def test_work_doubles_with_the_length_of_the_worst_texts(work: Work, name: str, unit: str) -> None:
    check_linear(work, name, unit)


@pytest.mark.parametrize("unit", ['{"<|":', '{"name":{"<|":'])
def test_brackets_deeper_than_python_decodes_are_not_decoded_again(work: Work, unit: str) -> None:
    """Each of the last thousand decodes the rest of the text, which is the constant."""
    check_linear(work, "json_object", unit, 30_000, constant=5_000_000)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_work_doubles_with_the_length_of_every_repeated_pair(work: Work, name: str) -> None:
    pieces = [*SHARDS[name], *(piece for piece in SOUP if len(piece) < 20)]
    for unit in (*pieces, *map("".join, itertools.product(pieces, pieces))):
        check_linear(work, name, unit)


def test_a_quadratic_parser_would_be_found(work: Work) -> None:
    """Decoding from the whole text, as before: every failure counts the lines before it."""
    import json

    def decode_everywhere(length: int) -> int:
        text = CountingText("{\n" * (length // 2))
        text.work = work
        work.n_characters = 0
        for start in range(0, length, 2):
            with pytest.raises(json.JSONDecodeError):
                json.JSONDecoder().raw_decode(text, start)
        return work.n_characters

    assert decode_everywhere(4_000) > 3.5 * decode_everywhere(2_000)
