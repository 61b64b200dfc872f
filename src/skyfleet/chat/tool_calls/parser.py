"""ToolCallParser: what a model's text says, does and thinks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from skyfleet.chat.call_ids import call_id
from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.pieces import END_THINK, THINK
from skyfleet.chat.tool_calls.strict_json import UNREADABLE, decode_at, decode_repaired


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    content: str
    reasoning: str | None
    """None: it did not think. Empty: it thought nothing, as Qwen3 does when told not to think."""
    tool_calls: tuple[ToolCall, ...]
    malformed_calls: tuple[str, ...]
    repaired_calls: int = 0
    """How many of `tool_calls` were given the closing brackets they lacked."""

    @property
    def message(self) -> Message:
        return Message(
            role="assistant",
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            malformed_calls=self.malformed_calls,
            repaired_calls=self.repaired_calls,
        )


class ToolCallParser(Protocol):
    def __call__(self, text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Every call is parsed or counted, never guessed. Never raises.

        `tools` type the arguments of formats that write them as bare text; without them such an
        argument is a string.
        """
        ...


class ToolCallWriter(Protocol):
    def __call__(self, calls: Sequence[ToolCall], /) -> Iterable[str]:
        """The calls as the model would say them, its marks as `Mark`s; joined it is the text."""
        ...


END_OF_THOUGHT = {THINK: END_THINK, "[THINK]": "[/THINK]"}

_THOUGHT = re.compile("|".join(map(re.escape, (*END_OF_THOUGHT, *END_OF_THOUGHT.values()))))
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What an opening mark leads to; neither calls nor malformed, it is speech after all."""

    end: int
    calls: tuple[ToolCall, ...] = ()
    """Without an id where the model gave none."""
    malformed: bool = False
    repaired: bool = False


ReadBlock = Callable[[str, re.Match[str]], Block]


def marks(openings: str) -> re.Pattern[str]:
    """What a reader stops at: thoughts, and the format's own `openings`."""
    return re.compile(f"{THINK}|{END_THINK}|{openings}")


def read_turn(text: str, marks: re.Pattern[str], read_block: ReadBlock) -> Parsed:
    """Split `text` into thought, speech, calls, and what tried to be a call.

    A `</think>` that nothing opened closes a thought the chat template opened: all before it is
    reasoning. A thought that is never closed lasts to the end of the text.
    """
    thoughts: list[str] = []
    speech: list[str] = []
    blocks: list[tuple[str, Block]] = []
    spoken = position = 0
    while mark := marks.search(text, position):
        before, start, position = text[spoken : mark.start()], mark.start(), mark.end()
        if closing := END_OF_THOUGHT.get(mark[0]):
            close = text.find(closing, position)
            thoughts.append(text[position:] if close < 0 else text[position:close])
            position = len(text) if close < 0 else close + len(closing)
        elif mark[0] not in END_OF_THOUGHT.values():
            block = read_block(text, mark)
            position = block.end
            if not (block.calls or block.malformed):
                continue
            blocks.append((text[start:position], block))
        elif not thoughts:
            thoughts.append(text[:start])
            before = ""
            speech.clear()
            blocks.clear()
        speech.append(before)
        spoken = position
    speech.append(text[spoken:])
    return Parsed(
        content=_joined(speech),
        reasoning=_joined(thoughts) if thoughts else None,
        tool_calls=with_ids([call for _, block in blocks for call in block.calls]),
        malformed_calls=tuple(said for said, block in blocks if block.malformed),
        repaired_calls=sum(len(block.calls) for _, block in blocks if block.repaired),
    )


def thoughts_aside(text: str) -> tuple[str, str | None]:
    """What is said aloud and what is thought; behind words, `<think>` that nothing closes is a word."""
    ends = (mark.end() for mark in _THOUGHT.finditer(text) if mark[0] not in END_OF_THOUGHT)
    unclosed = _THOUGHT.search(text, max(ends, default=0))
    before = text[: unclosed.start()].rstrip() if unclosed else text
    parsed = _read_thoughts(before)
    if unclosed and not parsed.content:
        before, parsed = text, _read_thoughts(text)
    if parsed.reasoning is None:
        return text, None
    return parsed.content + text[len(before) :].rstrip(), parsed.reasoning


def opens_thought(text: str) -> bool:
    """Whether a thought is begun and not ended: what follows belongs to it."""
    marks = _THOUGHT.findall(text)
    return bool(marks) and marks[-1] in END_OF_THOUGHT


def skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def up_to(text: str, position: int, closing: str) -> tuple[str, int]:
    """What stands before the next `closing`, and where that ends."""
    end = text.find(closing, position)
    if end < 0:
        raise ValueError(f"{closing} is missing")
    return text[position:end], end + len(closing)


def with_ids(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """A model's own ids are kept, unless it says one twice: then they are counted anew."""
    ids = [call.id or f"call_{i}" for i, call in enumerate(calls)]
    if len(set(ids)) < len(ids):
        ids = [call_id(call.name, i) for i, call in enumerate(calls)]
    return tuple(replace(call, id=id) for call, id in zip(calls, ids, strict=True))


def _joined(pieces: list[str]) -> str:
    return "\n".join(filter(None, map(str.strip, pieces)))


def _read_thoughts(text: str) -> Parsed:
    return read_turn(text, _THOUGHT, lambda _, mark: Block(end=mark.end()))


SPECIAL = "<|"
"""How special tokens begin: where one stands in the text, the turn is over."""


def read_json_block(
    text: str,
    start: int,
    make_call: Callable[[Any], ToolCall],
    *,
    closing: str,
    boundary: re.Pattern[str],
    wrapper: int,
) -> Block:
    """The call whose JSON begins at `start`, or as much of the text as it spoils: to `boundary`.

    `wrapper` counts the brackets that hold the arguments.
    """
    start = skip_space(text, start)
    try:
        value, end = decode_at(text, start)
        end = _end_of_block(text, end, closing, boundary)
        return Block(end=end, calls=(make_call(value),))
    except UNREADABLE:
        stop = boundary.search(text, start)
    closed = stop is not None and stop[0] == closing
    cut = stop is None or stop[0] == SPECIAL
    body = text[start : stop.start()] if stop else text[start:]
    end = stop.end() if stop and closed else start + len(body)
    try:
        value = decode_repaired(body, closed=closed, wrapper=wrapper if cut else 0)
        return Block(end=end, calls=(make_call(value),), repaired=True)
    except UNREADABLE:
        return Block(end=end, malformed=True)


def _end_of_block(text: str, position: int, closing: str, boundary: re.Pattern[str]) -> int:
    position = skip_space(text, position)
    if text.startswith(closing, position):
        return position + len(closing)
    mark = boundary.match(text, position)
    opens = mark is not None and not mark[0].startswith("</")
    if position == len(text) or text.startswith(SPECIAL, position) or opens:
        return position
    raise ValueError("something follows the call")
