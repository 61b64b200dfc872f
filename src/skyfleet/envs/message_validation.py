"""Validate the messages and tools that an environment returns, and measure and cut messages."""

from __future__ import annotations

import json
import marshal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from skyfleet.chat.message import Image, Message, Part, Role, Text, ToolCall, ToolSpec
from skyfleet.envs.values import (
    MAX_JSON_CHARACTERS,
    convert_bool,
    convert_count,
    convert_items,
    convert_json,
    convert_text,
    format_value,
)
from skyfleet.errors import EnvError

MAX_MESSAGES = 10_000
"""In one observation or step."""
MAX_TOOLS = 2_000
MAX_NAME_CHARACTERS = 200
"""Of a tool, and of a number in a log line."""

_ROLES = frozenset(get_args(Role))

_checked_tools: dict[bytes, tuple[ToolSpec, ...]] = {}
"""By their contents: what the tools of an environment were converted to. Environments return the
same tools in every episode, and checking their schemas would be a tenth of a short one."""
_MAX_CHECKED = 256
_MAX_STAMP_BYTES = 1 << 20
_counted_tools: dict[int, tuple[Sequence[ToolSpec], int]] = {}
"""By id: tools and their number of characters."""


def convert_messages(messages: object, method: str) -> tuple[Message, ...]:
    if type(messages) is tuple and len(messages) == 1 and is_plain_text(messages[0]):
        return messages
    return convert_items(
        messages,
        f"{method}: messages",
        MAX_MESSAGES,
        lambda message: _convert_message(message, method),
    )


def is_plain_text(message: object) -> bool:
    """Whether it is a message that needs no conversion, as nearly all are."""
    return (
        type(message) is Message
        and type(message.content) is str
        and type(message.role) is str
        and message.role in _ROLES
        and (message.tool_call_id is None or type(message.tool_call_id) is str)
        and message.reasoning is None
        and type(message.tool_calls) is tuple
        and not message.tool_calls
        and type(message.malformed_calls) is tuple
        and not message.malformed_calls
        and type(message.repaired_calls) is int
        and message.repaired_calls >= 0
        and type(message.is_error) is bool
    )


def _convert_message(message: object, method: str) -> Message:
    if is_plain_text(message):
        assert isinstance(message, Message)
        return message
    if not isinstance(message, Message):
        raise EnvError(
            f"{method} returned {format_value(message)} among its messages, not a Message"
        )
    where = f"{method}: a message's"
    role = convert_text(message.role, f"{where} role")
    if role not in _ROLES:
        raise EnvError(f"{where} role is {role!r:.60}; use one of {', '.join(sorted(_ROLES))}")
    content: str | tuple[Part, ...]
    if isinstance(message.content, str):
        content = convert_text(message.content, f"{where} content")
    elif isinstance(message.content, tuple | list):
        content = convert_items(
            message.content,
            f"{where} content",
            MAX_MESSAGES,
            lambda part: _convert_part(part, where),
        )
    else:
        raise EnvError(
            f"{where} content is {format_value(message.content)}; return a text, or Text and Image parts"
        )
    return Message(
        role=role,  # type: ignore[arg-type]
        content=content,
        reasoning=None
        if message.reasoning is None
        else convert_text(message.reasoning, f"{where} reasoning"),
        tool_calls=convert_items(
            message.tool_calls,
            f"{where} tool_calls",
            MAX_TOOLS,
            lambda call: _convert_call(call, where),
        ),
        malformed_calls=convert_items(
            message.malformed_calls,
            f"{where} malformed_calls",
            MAX_TOOLS,
            lambda text: convert_text(text, f"{where} malformed_calls"),
        ),
        repaired_calls=convert_count(message.repaired_calls, f"{where} repaired_calls") or 0,
        tool_call_id=None
        if message.tool_call_id is None
        else convert_text(message.tool_call_id, f"{where} tool_call_id"),
        is_error=convert_bool(message.is_error, f"{where} is_error", EnvError),
    )


def _convert_part(part: object, where: str) -> Part:
    if isinstance(part, Text):
        return part if type(part.text) is str else Text(convert_text(part.text, f"{where} text"))
    if isinstance(part, Image) and isinstance(part.data, bytes | bytearray):
        media_type = convert_text(part.media_type, f"{where} media_type")
        if len(media_type) > MAX_NAME_CHARACTERS:
            raise EnvError(f"{where} media_type is {format_value(media_type)}; return image/png")
        return Image(bytes(part.data), media_type)
    raise EnvError(f"{where} content has {format_value(part)}; use Text(...) or Image(bytes)")


def _convert_call(call: object, where: str) -> ToolCall:
    if not isinstance(call, ToolCall):
        raise EnvError(f"{where} tool_calls have {format_value(call)}, not a ToolCall")
    return ToolCall(
        id=convert_text(call.id, f"{where} tool call id"),
        name=convert_text(call.name, f"{where} tool call name"),
        arguments=convert_json(call.arguments, f"{where} tool call arguments"),
        repair=convert_text(call.repair, f"{where} tool call repair"),
    )


def convert_tools(tools: object, method: str) -> tuple[ToolSpec, ...]:
    if type(tools) is tuple and not tools:
        return tools
    stamp = _stamp_tools(tools)
    if stamp is not None and stamp in _checked_tools:
        return _checked_tools[stamp]
    converted = convert_items(
        tools, f"{method}: tools", MAX_TOOLS, lambda tool: _convert_tool(tool, method)
    )
    names = [tool.name for tool in converted]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise EnvError(f"{method} returned two tools named {twice!r:.60}; rename one")
    if stamp is not None:
        if len(_checked_tools) >= _MAX_CHECKED:
            del _checked_tools[next(iter(_checked_tools))]
        _checked_tools[stamp] = converted
    return converted


def _stamp_tools(tools: object) -> bytes | None:
    """The contents of tools with plain schemas, in one piece; an environment may change a schema.

    Unlike a comparison it tells 1 from True, and runs none of the environment's code.
    """
    if type(tools) not in (tuple, list) or any(type(tool) is not ToolSpec for tool in tools):  # type: ignore[attr-defined]
        return None
    try:
        # Version 2 writes equal values equally, whether or not they are the same object.
        stamp = marshal.dumps([(t.name, t.description, t.parameters) for t in tools], 2)  # type: ignore[attr-defined]
    except (ValueError, AttributeError):  # a value of another type, a field that is not set
        return None
    return stamp if len(stamp) <= _MAX_STAMP_BYTES else None


def _convert_tool(tool: object, method: str) -> ToolSpec:
    if not isinstance(tool, ToolSpec):
        raise EnvError(f"{method} returned {format_value(tool)} among its tools, not a ToolSpec")
    name = convert_text(tool.name, f"{method}: a tool's name")
    if not name or len(name) > MAX_NAME_CHARACTERS:
        raise EnvError(f"{method}: a tool's name is {format_value(name)}; give it a short one")
    where = f"{method}: tool {name}"
    description = convert_text(tool.description, f"{where}: description")
    if len(description) > MAX_JSON_CHARACTERS:
        raise EnvError(f"{where}: description has {len(description):,} characters; shorten it")
    parameters = convert_json(tool.parameters, f"{where}: parameters")
    return ToolSpec(name=name, description=description, parameters=parameters)


def count_characters(messages: Iterable[Message], tools: Sequence[ToolSpec] = ()) -> int:
    """The characters of messages and tools; an image counts a sixteenth of its bytes."""
    total = _count_tools(tools) if tools else 0
    for message in messages:
        content = message.content
        if isinstance(content, str):
            total += len(content)
        else:
            total += sum(
                len(part.text) if isinstance(part, Text) else len(part.data) // 16
                for part in content
            )
        total += len(message.reasoning or "") + len(message.tool_call_id or "")
        if message.tool_calls or message.malformed_calls:
            total += sum(map(len, map(format_call, message.tool_calls)))
            total += sum(map(len, message.malformed_calls))
    return total


def _count_tools(tools: Sequence[ToolSpec]) -> int:
    known = _counted_tools.get(id(tools))
    if known is not None and known[0] is tools:
        return known[1]
    total = sum(map(len, map(format_tool, tools)))
    if type(tools) is tuple:
        if len(_counted_tools) >= _MAX_CHECKED:
            del _counted_tools[next(iter(_counted_tools))]
        _counted_tools[id(tools)] = (tools, total)
    return total


def format_tool(tool: ToolSpec) -> str:
    """What any chat format writes of a tool, in some form."""
    return f"{tool.name}{tool.description}{_to_json(tool.parameters)}"


def format_call(call: ToolCall) -> str:
    return f"{call.id}{call.name}{_to_json(call.arguments)}"


def _to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def cut_messages(messages: Iterable[Message], max_characters: int) -> tuple[Message, ...]:
    """What is recorded of messages that are too long for any agent: their beginning."""
    kept: list[Message] = []
    left = max_characters
    for message in messages:
        if left <= 0:
            break
        cut, left = _cut_message(message, left)
        kept.append(cut)
    return tuple(kept)


def _cut_message(message: Message, left: int) -> tuple[Message, int]:
    """Keep so many characters; the beginning of the first call that does not fit is malformed."""

    def take(text: str) -> str:
        nonlocal left
        taken, left = text[: max(0, left)], left - len(text)
        return taken

    text = message.text
    note = f"\n(cut: the first {left:,} of {len(text):,} characters)" if len(text) > left else ""
    content = take(text) + note
    reasoning = None if message.reasoning is None else take(message.reasoning)
    tool_call_id = None if message.tool_call_id is None else take(message.tool_call_id)
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for call in message.tool_calls:
        formatted = format_call(call)
        is_whole = len(formatted) <= left
        taken = take(formatted)
        if is_whole:
            calls.append(call)
        elif taken:
            malformed.append(taken)
    malformed += filter(None, map(take, message.malformed_calls))
    cut = replace(
        message,
        content=content,
        reasoning=reasoning,
        tool_call_id=tool_call_id,
        tool_calls=tuple(calls),
        malformed_calls=tuple(malformed),
    )
    return cut, left
