"""Difference: two episodes turn by turn, and the first action in which they part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import count
from typing import Any

from skyfleet.analysis.before_after import Row, action_text, aligned, first_divergence
from skyfleet.analysis.viewer.episode import pretty
from skyfleet.chat.message import Message
from skyfleet.trajectories.trajectory import Trajectory, Turn

_WORDS_AT_MOST = 2_000
"""Of both texts; beyond it a difference is marked as a whole, for the time it would take."""

_SIDES = ("left", "right")

Piece = tuple[str, bool]
"""A stretch of text, and whether the other side lacks it."""


def difference(left: Trajectory, right: Trajectory) -> dict[str, Any]:
    """Turns side by side; equal actions face each other wherever the order allows."""
    prompts = (_spoken(left.opening), _spoken(right.opening))
    numbers = (count(1), count(1))
    return {
        "same_opening": prompts[0] == prompts[1],
        "opening": dict(zip(_SIDES, word_difference(*prompts), strict=True)),
        "rows": [_row(pair, numbers) for pair in aligned(left, right)],
        "first_difference": first_divergence(left, right),
    }


def word_difference(left: str, right: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces: `a b` and `a c` share `a ` and differ in the rest."""
    if left == right:
        return [(left, False)], [(right, False)]
    a, b = _words(left), _words(right)
    if len(a) + len(b) > _WORDS_AT_MOST:
        return [(left, True)], [(right, True)]
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for tag, i, i_end, j, j_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for side, words in zip(pieces, (a[i:i_end], b[j:j_end]), strict=True):
            if words:
                side.append(("".join(words), tag != "equal"))
    return pieces


def _row(pair: Row, numbers: tuple[Iterator[int], Iterator[int]]) -> dict[str, Any]:
    one, other = pair
    actions = word_difference(_acted(one), _acted(other))
    replies = word_difference(_replied(one), _replied(other))
    sides = zip(_SIDES, pair, actions, replies, numbers, strict=True)
    return {
        "same_action": None not in pair and _done(one) == _done(other),
        "same_replies": _replied(one) == _replied(other),
    } | {
        name: turn and _side(turn, action, reply, next(number))
        for name, turn, action, reply, number in sides
    }


def _side(turn: Turn, action: list[Piece], replies: list[Piece], number: int) -> dict[str, Any]:
    refused = any(reply.is_error for reply in turn.replies)
    return {
        "turn": number,
        "action": action,
        "replies": replies,
        "is_error": refused or bool(turn.action.malformed_calls),
    }


def _done(turn: Turn | None) -> str:
    return action_text(turn.action) if turn else ""


def _acted(turn: Turn | None) -> str:
    if turn is None:
        return ""
    calls = [f"{call.name} {pretty(call.arguments)}" for call in turn.action.tool_calls]
    return "\n".join(filter(None, (turn.action.text, *calls, *turn.action.malformed_calls)))


def _replied(turn: Turn | None) -> str:
    return _spoken(turn.replies) if turn else ""


def _spoken(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.text for message in messages if message.text)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+\s*|[^\w\s]\s*|\s+", text)
