"""Episode comparison: two episodes turn by turn, with the first different action."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import count
from typing import Any

from skyfleet.analysis.before_after import Row, align_turns, find_first_divergence, format_action
from skyfleet.analysis.viewer.episode import format_json
from skyfleet.chat.message import Message
from skyfleet.trajectories.trajectory import Trajectory, Turn

_MAX_WORDS = 2_000
"""Longer pairs of texts are marked as different as a whole, because diffing is slow."""

_SIDES = ("left", "right")

Piece = tuple[str, bool]
"""A part of a text, and whether it is missing on the other side."""


def compare_episodes(left: Trajectory, right: Trajectory) -> dict[str, Any]:
    """Turns side by side; equal actions are aligned where their order allows it."""
    prompts = (_join_texts(left.prompt), _join_texts(right.prompt))
    numbers = (count(1), count(1))
    return {
        "same_prompt": prompts[0] == prompts[1],
        "prompt": dict(zip(_SIDES, diff_words(*prompts), strict=True)),
        "rows": [_row(pair, numbers) for pair in align_turns(left, right)],
        "first_difference": find_first_divergence(left, right),
    }


def diff_words(left: str, right: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces: `a b` and `a c` share `a ` and differ in the rest."""
    if left == right:
        return [(left, False)], [(right, False)]
    a, b = _words(left), _words(right)
    if len(a) + len(b) > _MAX_WORDS:
        return [(left, True)], [(right, True)]
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for tag, i, i_end, j, j_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for side, words in zip(pieces, (a[i:i_end], b[j:j_end]), strict=True):
            if words:
                side.append(("".join(words), tag != "equal"))
    return pieces


def _row(pair: Row, numbers: tuple[Iterator[int], Iterator[int]]) -> dict[str, Any]:
    one, other = pair
    actions = diff_words(_format_turn(one), _format_turn(other))
    replies = diff_words(_format_replies(one), _format_replies(other))
    sides = zip(_SIDES, pair, actions, replies, numbers, strict=True)
    return {
        "same_action": None not in pair and _action_key(one) == _action_key(other),
        "same_replies": _format_replies(one) == _format_replies(other),
    } | {
        name: turn and _side(turn, action, reply, next(number))
        for name, turn, action, reply, number in sides
    }


def _side(turn: Turn, action: list[Piece], replies: list[Piece], number: int) -> dict[str, Any]:
    has_error = any(reply.is_error for reply in turn.replies)
    return {
        "turn": number,
        "action": action,
        "replies": replies,
        "is_error": has_error or bool(turn.action.malformed_calls),
    }


def _action_key(turn: Turn | None) -> str:
    return format_action(turn.action) if turn else ""


def _format_turn(turn: Turn | None) -> str:
    if turn is None:
        return ""
    calls = [f"{call.name} {format_json(call.arguments)}" for call in turn.action.tool_calls]
    return "\n".join(filter(None, (turn.action.text, *calls, *turn.action.malformed_calls)))


def _format_replies(turn: Turn | None) -> str:
    return _join_texts(turn.replies) if turn else ""


def _join_texts(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.text for message in messages if message.text)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+\s*|[^\w\s]\s*|\s+", text)
