"""Tool call ids: build them, parse them and match results to calls.

Kimi K2 and gpt-oss use `functions.look_up:0`. Mistral's templates require nine letters and digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

from skyfleet.chat.message import Message, ToolCall

_PREFIX = "functions."


def format_call_id(name: str, index: int) -> str:
    """`format_call_id("look_up", 0)` is functions.look_up:0."""
    return f"{_PREFIX}{name}:{index}"


def parse_tool_name(call_id: str) -> str:
    """`parse_tool_name("functions.look_up:0")` is look_up; empty if the id names no function."""
    return call_id.removeprefix(_PREFIX).rpartition(":")[0]


def shorten_call_id(call_id: str) -> str:
    """`call_id` if it is nine letters and digits, else the first nine characters of its hash."""
    is_short = len(call_id) == 9 and call_id.isascii() and call_id.isalnum()
    return call_id if is_short else sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def resolve_call_ids(messages: Sequence[Message]) -> Iterator[tuple[Message, str]]:
    """Yield each message with the rendered id of the call it answers; empty if it answers none."""
    rendered: dict[str, str] = {}
    for message in messages:
        for index, call in enumerate(message.tool_calls):
            rendered[call.id] = _rendered_id(call, index)
        answered = message.tool_call_id or ""
        yield message, rendered.get(answered, answered)


def _rendered_id(call: ToolCall, index: int) -> str:
    """The call's own id if it names the tool, else one built from its index."""
    names_tool = parse_tool_name(call.id) == call.name
    return call.id if names_tool else format_call_id(call.name, index)
