"""Convert message content to the content blocks of MCP and OpenEnv, and back."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skyfleet.chat.message import Image, Part, Text

DONE_META = "skyfleet/done"
"""Key in the `_meta` of an MCP result: the episode is over."""

MAX_IMAGE_BYTES = 20 * 2**20
"""Of all images in one result together."""


def to_content_blocks(content: str | tuple[Part, ...]) -> list[dict[str, str]]:
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


def parse_content_blocks(blocks: Sequence[Any], *, max_characters: int) -> str | tuple[Part, ...]:
    """Return text and images. Other blocks are described; text beyond the limit is cut."""
    parts = _limit_images(map(_parse_block, blocks))
    if any(isinstance(part, Image) for part in parts):
        return _limit_text(parts, max_characters)
    text = "\n".join(part.text for part in parts if isinstance(part, Text))
    return truncate(text, max_characters)


def to_text(value: object, *, max_characters: int) -> str:
    """Return a string unchanged and any other JSON value as JSON, cut to the limit."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return truncate(text, max_characters)


def truncate(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    return text[:max_characters] + _format_cut(max_characters, len(text))


def _format_cut(kept: int, total: int) -> str:
    return f"\n(cut: the first {kept:,} of {total:,} characters; ask for less)"


def _limit_images(parts: Iterable[Part]) -> list[Part]:
    shown: list[Part] = []
    left = MAX_IMAGE_BYTES
    for part in parts:
        size = len(part.data) if isinstance(part, Image) else 0
        if size <= left:
            shown.append(part)
            left -= size
        else:
            limit = f"{MAX_IMAGE_BYTES:,} a result; ask for less"
            shown.append(Text(f"(image not shown: {size:,} bytes, over {limit})"))
    return shown


def _limit_text(parts: Sequence[Part], max_characters: int) -> tuple[Part, ...]:
    """Apply one budget to all texts together; the note about the cut comes last."""
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
    return (*kept, Text(_format_cut(max_characters, total)))


def _parse_block(block: Any) -> Part:
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
