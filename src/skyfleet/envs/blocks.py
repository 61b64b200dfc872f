"""Blocks: a message's content as MCP and OpenEnv send it, and back."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.message import Image, Part, Text

DONE_META = "skyfleet/done"
"""In the `_meta` of an MCP result: the episode is over."""


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


def content_of(
    blocks: Sequence[Mapping[str, Any]], *, max_characters: int
) -> str | tuple[Part, ...]:
    """Text and pictures. What a message cannot hold is named; text beyond the limit is cut."""
    parts = tuple(map(_part, blocks))
    if any(isinstance(part, Image) for part in parts):
        return tuple(
            Text(shortened(part.text, max_characters)) if isinstance(part, Text) else part
            for part in parts
        )
    text = "\n".join(part.text for part in parts if isinstance(part, Text))
    return shortened(text, max_characters)


def text_of(value: object, *, max_characters: int) -> str:
    """Any JSON value as text, a string as it is."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text, max_characters)


def shortened(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    note = f"(cut: the first {max_characters:,} of {len(text):,} characters; ask for less)"
    return f"{text[:max_characters]}\n{note}"


def _part(block: Mapping[str, Any]) -> Part:
    kind, inside = block.get("type"), block.get("resource")
    if kind == "text":
        return Text(str(block.get("text", "")))
    if kind == "image":
        return Image(b64decode(str(block.get("data", ""))), str(block.get("mimeType", "image/png")))
    if isinstance(inside, Mapping) and "text" in inside:
        return Text(str(inside["text"]))
    what = block.get("uri") or (inside or block).get("mimeType") or "no description"
    return Text(f"({kind} not shown: {what})")
