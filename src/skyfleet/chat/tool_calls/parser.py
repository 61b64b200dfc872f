"""ToolCallParser, the tool parser: split model output into text, reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from skyfleet.chat.call_ids import format_call_id
from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.tokenizer import END_THINK, THINK
from skyfleet.chat.tool_calls.strict_json import PARSE_ERRORS, decode_at, decode_repaired


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    content: str
    reasoning: str | None
    """None without reasoning; empty if it is empty, as for Qwen3 with enable_thinking=false."""
    tool_calls: tuple[ToolCall, ...]
    malformed_calls: tuple[str, ...]
    repaired_calls: int = 0
    """How many of `tool_calls` were completed with missing closing brackets."""

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
    def __call__(self, text: str, /, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
        """Every call is parsed exactly or counted as malformed. Never raises.

        `tools` supply argument types for formats that write arguments as bare text; without them
        such an argument is a string.
        """
        ...


class ToolCallWriter(Protocol):
    def __call__(self, calls: Sequence[ToolCall], /) -> Iterable[str]:
        """The calls as the model would write them, in pieces of text and `SpecialToken`s."""
        ...


REASONING_ENDS = {THINK: END_THINK, "[THINK]": "[/THINK]"}

_REASONING = re.compile("|".join(map(re.escape, (*REASONING_ENDS, *REASONING_ENDS.values()))))
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The result of a start tag; with neither calls nor malformed it is ordinary text."""

    end: int
    calls: tuple[ToolCall, ...] = ()
    """With an empty id if the model wrote none."""
    malformed: bool = False
    repaired: bool = False


BlockParser = Callable[[str, re.Match[str]], Block]


def compile_start_tags(start_tags: str) -> re.Pattern[str]:
    """A pattern of the reasoning tags and the format's own `start_tags`."""
    return re.compile(f"{THINK}|{END_THINK}|{start_tags}")


def parse_turn(text: str, start_tags: re.Pattern[str], parse_block: BlockParser) -> ParsedTurn:
    """Split `text` into reasoning, content, calls and malformed calls.

    A `</think>` without a `<think>` closes reasoning that the chat template opened: all text before
    it is reasoning. Reasoning that is never closed extends to the end of the text.
    """
    reasoning: list[str] = []
    content: list[str] = []
    blocks: list[tuple[str, Block]] = []
    consumed = position = 0
    while start_tag := start_tags.search(text, position):
        start, position = start_tag.span()
        is_dropped = False
        if closing := REASONING_ENDS.get(start_tag[0]):
            close = text.find(closing, position)
            reasoning.append(text[position:] if close < 0 else text[position:close])
            position = len(text) if close < 0 else close + len(closing)
        elif start_tag[0] not in REASONING_ENDS.values():
            block = parse_block(text, start_tag)
            position = block.end
            if not (block.calls or block.malformed):
                continue
            blocks.append((text[start:position], block))
        elif not reasoning:
            reasoning.append(text[:start])
            is_dropped = True
            content.clear()
            blocks.clear()
        # Not before it is known to be content: text with many start tags is sliced once.
        content.append("" if is_dropped else text[consumed:start])
        consumed = position
    content.append(text[consumed:])
    return ParsedTurn(
        content=_join(content),
        reasoning=_join(reasoning) if reasoning else None,
        tool_calls=assign_call_ids([call for _, block in blocks for call in _mark(block)]),
        malformed_calls=tuple(raw for raw, block in blocks if block.malformed),
        repaired_calls=sum(len(block.calls) for _, block in blocks if block.repaired),
    )


def _mark(block: Block) -> Sequence[ToolCall]:
    if not block.repaired:
        return block.calls
    return [replace(call, repair="closing brackets") for call in block.calls]


def split_reasoning(text: str) -> tuple[str, str | None]:
    """The content and the reasoning of `text`; an unclosed `<think>` behind content is content."""
    ends = (tag.end() for tag in _REASONING.finditer(text) if tag[0] not in REASONING_ENDS)
    unclosed = _REASONING.search(text, max(ends, default=0))
    before = text[: unclosed.start()].rstrip() if unclosed else text
    parsed = _parse_reasoning(before)
    if unclosed and not parsed.content:
        before, parsed = text, _parse_reasoning(text)
    if parsed.reasoning is None:
        return text, None
    return parsed.content + text[len(before) :].rstrip(), parsed.reasoning


def has_open_reasoning(text: str) -> bool:
    """Whether the last reasoning tag in `text` opens reasoning."""
    tags = _REASONING.findall(text)
    return bool(tags) and tags[-1] in REASONING_ENDS


def skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def read_until(text: str, position: int, closing: str, *, last: int) -> tuple[str, int]:
    """The text before the next `closing`, and the position behind it.

    `last` is the position of the last `closing` in the text: without it, every block that lacks one
    would search the whole rest.
    """
    if position > last:
        raise ValueError(f"{closing} is missing")
    end = text.find(closing, position)
    return text[position:end], end + len(closing)


def assign_call_ids(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Keep the ids that the model wrote, unless one occurs twice; then number all calls."""
    ids = [call.id or f"call_{i}" for i, call in enumerate(calls)]
    if len(set(ids)) < len(ids):
        ids = [format_call_id(call.name, i) for i, call in enumerate(calls)]
    return tuple(replace(call, id=id) for call, id in zip(calls, ids, strict=True))


def _join(pieces: list[str]) -> str:
    return "\n".join(filter(None, map(str.strip, pieces)))


def _parse_reasoning(text: str) -> ParsedTurn:
    return parse_turn(text, _REASONING, lambda _, tag: Block(end=tag.end()))


SPECIAL = "<|"
"""The beginning of special tokens: one in the text shows that the turn is over."""


def parse_json_block(
    text: str,
    start: int,
    make_call: Callable[[Any], ToolCall],
    *,
    closing: str,
    boundary: re.Pattern[str],
    wrapper: int,
) -> Block:
    """The call whose JSON begins at `start`, or a malformed block up to `boundary`.

    `wrapper` is the number of brackets around the arguments.
    """
    start = skip_space(text, start)
    try:
        value, end = decode_at(text, start)
        end = _find_block_end(text, end, closing, boundary)
        return Block(end=end, calls=(make_call(value),))
    except PARSE_ERRORS:
        stop = boundary.search(text, start)
    closed = stop is not None and stop[0] == closing
    cut = stop is None or stop[0] == SPECIAL
    body = text[start : stop.start()] if stop else text[start:]
    end = stop.end() if stop and closed else start + len(body)
    try:
        value = decode_repaired(body, closed=closed, wrapper=wrapper if cut else 0)
        return Block(end=end, calls=(make_call(value),), repaired=True)
    except PARSE_ERRORS:
        return Block(end=end, malformed=True)


def _find_block_end(text: str, position: int, closing: str, boundary: re.Pattern[str]) -> int:
    position = skip_space(text, position)
    if text.startswith(closing, position):
        return position + len(closing)
    tag = boundary.match(text, position)
    opens = tag is not None and not tag[0].startswith("</")
    if position == len(text) or text.startswith(SPECIAL, position) or opens:
        return position
    raise ValueError("text follows the call")
