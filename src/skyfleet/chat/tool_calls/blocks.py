"""Blocks: a model's text read once, left to right, whatever its format.

A format names the marks that open a block and reads the block. Thoughts, speech and the count of
what failed are the same for all, and a call inside a thought is part of that thought.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skyfleet.chat.call_ids import call_id
from skyfleet.chat.message import ToolCall
from skyfleet.chat.pieces import END_THINK, THINK
from skyfleet.chat.tool_calls.parser import Parsed

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
