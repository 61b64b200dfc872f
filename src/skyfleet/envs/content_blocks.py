"""Blocks: a message's content as MCP and OpenEnv send it, and back."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skyfleet.chat.message import Image, Part, Text

DONE_META = "skyfleet/done"
"""In the `_meta` of an MCP result: the episode is over."""

MAX_PICTURE_BYTES = 20 * 2**20
"""Of all pictures in one result together."""


def blocks_of(content: str | tuple[Part, ...]) -> list[dict[str, str]]:
    parts = (Text(content),) if isinstance(content, str) else content
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, Text)
        else {
            "type": "image",
            "data": b64encode(part.data).decode(),
            "mimeType": part.media_type,
        }
        for part in parts
    ]


def content_of(blocks: Sequence[Any], *, max_characters: int) -> str | tuple[Part, ...]:
    """Text and pictures. What a message cannot hold is named; text beyond the limit is cut."""
    parts = _without_excess_pictures(map(_part, blocks))
    if any(isinstance(part, Image) for part in parts):
        return _within(parts, max_characters)
    text = "\n".join(part.text for part in parts if isinstance(part, Text))
    return shortened(text, max_characters)


def text_of(value: object, *, max_characters: int) -> str:
    """Any JSON value as text, a string as it is."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text, max_characters)


def shortened(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    return text[:max_characters] + _cut(max_characters, len(text))


def _cut(kept: int, total: int) -> str:
    return f"\n(cut: the first {kept:,} of {total:,} characters; ask for less)"


def _without_excess_pictures(parts: Iterable[Part]) -> list[Part]:
    shown: list[Part] = []
    left = MAX_PICTURE_BYTES
    for part in parts:
        size = len(part.data) if isinstance(part, Image) else 0
        if size <= left:
            shown.append(part)
            left -= size
        else:
            limit = f"{MAX_PICTURE_BYTES:,} a result; ask for less"
            shown.append(Text(f"(image not shown: {size:,} bytes, over {limit})"))
    return shown


def _within(parts: Sequence[Part], max_characters: int) -> tuple[Part, ...]:
    """One budget for all texts together; the note about it comes last."""
    total = sum(len(part.text) for part in parts if isinstance(part, Text))
    if total <= max_characters:
        return tuple(parts)
    kept: list[Part] = []
    left = max_characters
    for part in parts:
        if isinstance(part, Image):
            kept.append(part)
        elif text := part.text[:left]:
            kept.append(Text(text))
            left -= len(text)
    return (*kept, Text(_cut(max_characters, total)))


def _part(block: Any) -> Part:
    if not isinstance(block, Mapping):
        return Text(block if isinstance(block, str) else json.dumps(block, ensure_ascii=False))
    kind, inside = block.get("type"), block.get("resource")
    if kind == "text":
        return Text(str(block.get("text", "")))
    if kind == "image":
        return Image(b64decode(str(block.get("data", ""))), str(block.get("mimeType", "image/png")))
    if isinstance(inside, Mapping) and "text" in inside:
        return Text(str(inside["text"]))
    described = inside if isinstance(inside, Mapping) else block
    what = block.get("uri") or described.get("mimeType") or "no description"
    return Text(f"({kind} not shown: {what})")
