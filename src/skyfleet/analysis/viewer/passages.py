"""Passages: all that a person could read in an episode, and where in it a text is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyfleet.chat.message import Message
from skyfleet.trajectories.trajectory import Trajectory

_BEFORE, _AFTER = 40, 120
"""Characters shown around a place."""


def where_said(trajectory: Trajectory, text: str) -> str | None:
    """The first passage that says `text`, with a few words around it; None where none does.

    Token ids, logprobs and pictures are not read: an archive's search finds texts in those too.
    """
    wanted = text.lower()
    for passage in _passages(trajectory):
        at = passage.lower().find(wanted)
        if at >= 0:
            start, stop = max(0, at - _BEFORE), at + len(text) + _AFTER
            cut = " ".join(passage[start:stop].split())
            return ("…" if start else "") + cut + ("…" if stop < len(passage) else "")
    return None


def _passages(trajectory: Trajectory) -> Iterator[str]:
    yield trajectory.task_key
    yield trajectory.env_key
    for message in trajectory.opening:
        yield from _said(message)
    for turn in trajectory.turns:
        for message in (turn.action, *turn.replies):
            yield from _said(message)
    if trajectory.grade:
        yield trajectory.grade.explanation
    if trajectory.failure:
        yield trajectory.failure.kind
        yield trajectory.failure.detail


def _said(message: Message) -> Iterator[str]:
    yield message.text
    yield message.reasoning or ""
    for call in message.tool_calls:
        yield call.name
        yield from _leaves(call.arguments)
    yield from message.malformed_calls


def _leaves(value: Any) -> Iterator[str]:
    """Names and values of arguments, however deep."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _leaves(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield str(value)
