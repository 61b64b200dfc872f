"""Call ids: which call a result answers, as a format says it.

Kimi K2 and gpt-oss say `functions.look_up:0`; Mistral's templates take nine letters and digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

from skyfleet.chat.message import Message, ToolCall

_PREFIX = "functions."


def call_id(name: str, place: int) -> str:
    """`call_id("look_up", 0)` is functions.look_up:0."""
    return f"{_PREFIX}{name}:{place}"


def called_name(call_id: str) -> str:
    """`called_name("functions.look_up:0")` is look_up; empty where the id names no function."""
    return call_id.removeprefix(_PREFIX).rpartition(":")[0]


def nine_characters(call_id: str) -> str:
    """`nine_characters("a1b2c3d4e")` is itself; of another id, always the same nine of its hash."""
    is_nine = len(call_id) == 9 and call_id.isascii() and call_id.isalnum()
    return call_id if is_nine else sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def with_answered_ids(messages: Sequence[Message]) -> Iterator[tuple[Message, str]]:
    """Each message and the id of the call it answers, empty where it answers none."""
    written: dict[str, str] = {}
    for message in messages:
        for place, call in enumerate(message.tool_calls):
            written[call.id] = _written_id(call, place)
        answered = message.tool_call_id or ""
        yield message, written.get(answered, answered)


def _written_id(call: ToolCall, place: int) -> str:
    """The call's own id where that names it, else the one its place gives it."""
    names_it = called_name(call.id) == call.name
    return call.id if names_it else call_id(call.name, place)
