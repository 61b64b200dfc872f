"""Call ids: `functions.look_up:0`, how Kimi K2 and gpt-oss say which call a result answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyfleet.chat.message import Message, ToolCall

_PREFIX = "functions."


def call_id(name: str, place: int) -> str:
    """`call_id("look_up", 0)` is functions.look_up:0."""
    return f"{_PREFIX}{name}:{place}"


def called_name(call_id: str) -> str:
    """`called_name("functions.look_up:0")` is look_up; empty where the id names no function."""
    return call_id.removeprefix(_PREFIX).rpartition(":")[0]


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
