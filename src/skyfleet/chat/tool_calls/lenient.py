"""Lenient parsing: tool calls that the strict parser rejects or does not look for.

Only what names an offered tool, with arguments that its schema knows, becomes a call, and each such
call is marked with how it was found. Calls that strict parsing finds stay as they are.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.tool_calls.formats import FORMATS
from skyfleet.chat.tool_calls.parser import ParsedTurn, assign_call_ids
from skyfleet.chat.tool_calls.strict_json import (
    PARSE_ERRORS,
    TOKENS,
    DecodeError,
    decode_at,
    find_closing_bracket,
    parse_call,
    reject_duplicates,
)

logger = logging.getLogger(__name__)

_MARKS = {
    "glm": ("<tool_call>",),
    "harmony": ("<|message|>",),
    "hermes": ("<tool_call>", "<function_call>"),
    "kimi_k2": ("<|tool_call_begin|>",),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "pythonic": ("<|tool_call_start|>", "<|python_start|>"),
    "qwen3_coder": ("<function=",),
}
"""What a text must contain for a format to be tried."""
_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(?P<body>.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_OPENING = re.compile(r"[\[{]")
_LINE_START = re.compile(r"^[ \t]*(?=[\[{])", re.MULTILINE)
_TAG = re.compile(r"</?[\w|:-]+>|<\|[\w|]+\|>|```")
_WHOLE_END = re.compile(r"""(?:["'\]},]|\b(?:true|false|null|True|False|None))\Z""")
"""How a text ends whose last value is whole; a number may have had more digits."""
_SEPARATORS = " \t\r\n,;"
_PYTHON_ERRORS = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)


def repair_message(message: Message, tools: Sequence[ToolSpec], *, log: bool = False) -> Message:
    """The message with the calls that can be recovered; the same message if there are none.

    A malformed call is repaired wherever it is. Text is searched only in a message without any call,
    and a call in it must end the message: what goes on is an explanation. `log` writes each repair to
    the log at level INFO instead of DEBUG.
    """
    if not tools or not isinstance(message.content, str):
        return message
    found: list[ToolCall] = []
    malformed: list[str] = []
    for text in message.malformed_calls:
        calls = _repair_text(text, tools)
        found.extend(calls)
        if not calls:
            malformed.append(text)
    content = message.content
    if not (message.tool_calls or found or malformed):
        content, found = _search_text(content, tools)
    if not found:
        return message
    for call in found:
        level = logging.INFO if log else logging.DEBUG
        logger.log(level, "%s: %s(%s)", call.repair, call.name, dict(call.arguments))
    return replace(
        message,
        content=content,
        tool_calls=assign_call_ids([*message.tool_calls, *found]),
        malformed_calls=tuple(malformed),
        repaired_calls=message.repaired_calls + len(found),
    )


def _repair_text(text: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
    """The calls that a malformed block was meant to be."""
    if turn := _parse_other_formats(text, tools):
        return list(turn.tool_calls)
    start = _OPENING.search(text)
    if start is None:
        return []
    body = text[start.start() :]
    end, missing = find_closing_bracket(body, 0, TOKENS)
    # What follows the call's own brackets, such as a closing tag, is not part of it.
    body = body[:end] if end is not None else body[: _find_tags_at_end(body)]
    return _parse_value(body, missing, tools)


def _search_text(content: str, tools: Sequence[ToolSpec]) -> tuple[str, list[ToolCall]]:
    """The text before the calls that end it, and these calls."""
    if turn := _parse_other_formats(content, tools):
        return turn.content, list(turn.tool_calls)
    fence = None
    for fence in _FENCE.finditer(content):  # noqa: B007 - the last one
        pass
    if fence is not None and not content[fence.end() :].strip():
        body, start, how = fence["body"].strip(), fence.start(), "fenced JSON"
    else:
        found = _find_values_at_end(content)
        if found is None:
            return content, []
        body, start, how = content[found:].strip(), found, "bare JSON"
    calls = _parse_list(body, tools, how)
    return (content[:start].rstrip(), calls) if calls else (content, [])


def _parse_other_formats(text: str, tools: Sequence[ToolSpec]) -> ParsedTurn | None:
    for name, marks in _MARKS.items():
        is_list = name == "pythonic" and text.lstrip().startswith("[")
        if not (is_list or any(mark in text for mark in marks)):
            continue
        turn = FORMATS[name].parse(text, tools)
        is_clean = not turn.malformed_calls and not (is_list and turn.content)
        if turn.tool_calls and is_clean and _are_offered(turn.tool_calls, tools):
            calls = [replace(call, repair=f"{name} format") for call in turn.tool_calls]
            return replace(turn, tool_calls=tuple(calls))
    return None


def _parse_list(text: str, tools: Sequence[ToolSpec], how: str) -> list[ToolCall]:
    """The calls if `text` is nothing but JSON objects, a list of them, or one that was cut."""
    position, values = 0, list[Any]()
    try:
        while position < len(text):
            value, position = decode_at(text, position)
            values += value if isinstance(value, list) else [value]
            while position < len(text) and text[position] in _SEPARATORS:
                position += 1
        calls = _make_calls(values, tools, how)
    except PARSE_ERRORS:
        end, missing = find_closing_bracket(text, 0, TOKENS)
        return _parse_value(text, missing, tools) if end is None else []
    return calls


def _parse_value(body: str, missing: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
    """A call in JSON with line breaks in strings, in a Python literal, or cut between two values."""
    if missing and not _WHOLE_END.search(body.rstrip()):
        return []
    cut = body.rstrip().rstrip(",") + missing
    how = "truncated JSON" if missing else "JSON with errors"
    for repaired in dict.fromkeys((body, cut)):
        try:
            value = _decode(repaired)
        except PARSE_ERRORS:
            try:
                # Sets and bytes have no JSON form; tuples are lists.
                value = _decode(json.dumps(_evaluate(repaired), allow_nan=False))
                how = "Python literal"
            except _PYTHON_ERRORS:
                continue
        try:
            return _make_calls(value if isinstance(value, list) else [value], tools, how)
        except PARSE_ERRORS:
            continue
    return []


def _decode(text: str) -> Any:
    """JSON with line breaks in strings; as in strict parsing, a key that occurs twice is an error."""
    return json.loads(text, strict=False, object_pairs_hook=reject_duplicates)


def _evaluate(text: str) -> Any:
    """Python warns of escapes that it does not know; here they are errors, as are repeated keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
    value = ast.literal_eval(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            reject_duplicates([(ast.literal_eval(key), None) for key in node.keys if key])
    return value


def _make_calls(values: Sequence[Any], tools: Sequence[ToolSpec], how: str) -> list[ToolCall]:
    """ValueError if a value is no call of an offered tool."""
    calls = [replace(parse_call(value, needs_arguments=True), repair=how) for value in values]
    if not _are_offered(calls, tools):
        raise ValueError("a call must name an offered tool and its arguments")
    return calls


def _are_offered(calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> bool:
    """Whether every call has the name of a tool and no argument that its schema does not have."""
    schemas = {tool.name: tool.parameters for tool in tools}
    return all(
        call.name in schemas and _allows_arguments(schemas[call.name], call.arguments)
        for call in calls
    )


def _allows_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(required, list) and not all(key in arguments for key in required):
        return False
    return not isinstance(properties, Mapping) or arguments.keys() <= properties.keys()


def _find_tags_at_end(text: str) -> int:
    """Where the tags at the end begin, which close a block whose brackets are not closed."""
    end = len(text.rstrip())
    for tag in reversed(list(_TAG.finditer(text))):
        if text[tag.end() : end].strip():
            break
        end = tag.start()
    return end


def _find_values_at_end(content: str) -> int | None:
    """Where JSON values begin, each on a line of its own, that go on to the end of the text.

    If none do, where the first line begins that looks like such a value and is none.
    """
    position, is_value = 0, False
    start: int | None = None
    failed: int | None = None
    for line in _LINE_START.finditer(content):
        if line.start() < position:
            continue
        if start is None or content[position : line.start()].strip(_SEPARATORS):
            start = line.start()
        try:
            _, position = decode_at(content, line.end())
            is_value = True
        except PARSE_ERRORS as error:
            failed = line.start() if failed is None else failed
            is_value = False
            position = error.position if isinstance(error, DecodeError) else len(content)
    if is_value and not content[position:].strip(_SEPARATORS):
        return start
    return failed
