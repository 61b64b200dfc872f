"""Retired words stay out of identifiers and file names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples")
RETIRED = frozenset(
    [
        "voice",
        "speaker",
        "speak",
        "spoken",
        "hear",
        "heard",
        "tell",
        "told",
        "said",
        "seat",
        "kin",
        "sift",
        "witness",
        "testify",
        "reach",
        "door",
        "wish",
        "errand",
        "farewell",
    ]
)
EXEMPT = {
    "src/skyfleet/worlds/ticketmaster.py": {"seat"},  # a tool's parameter and a table's column
    "src/skyfleet/trajectories/archive.py": {"tell"},  # the method of Python's files
    "src/skyfleet/sentinels/trend_checks.py": {"tell"},
}
"""Prompts are data, and other people's method names are theirs."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def find_words(identifier: str) -> set[str]:
    """`find_words("EngineKin_of")` is `{"engine", "kin", "of"}`."""
    return {word.lower() for word in _WORD.findall(identifier)}


def find_identifiers(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 1)
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield line, name
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield line, node.name
            case ast.keyword(arg=str(name)):
                yield line, name
            case ast.alias():
                yield line, node.name
                if node.asname is not None:
                    yield line, node.asname


def test_words_are_split_at_underscores_and_capitals() -> None:
    assert find_words("tell_KinOfURL") == {"tell", "kin", "of", "url"}
    assert not find_words("unreachable_doorway") & RETIRED


def test_an_import_under_another_name_has_two_identifiers() -> None:
    assert list(find_identifiers("import json as errand")) == [(1, "json"), (1, "errand")]


def test_no_identifier_contains_a_retired_word() -> None:
    find_cached = cache(find_words)
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for retired in (RETIRED - EXEMPT.get(path.relative_to(ROOT).as_posix(), set()),)
        for line, name in find_identifiers(path.read_text(encoding="utf-8"))
        if find_cached(name) & retired
    ]
    assert found == []


def test_no_file_is_named_with_a_retired_word() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in files if find_words(path.stem) & RETIRED] == []
