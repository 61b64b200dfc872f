"""Content blocks become text and images within two limits, whatever a server sends."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from skyfleet.chat.message import Image, Text
from skyfleet.envs import content_blocks as blocks
from skyfleet.envs.content_blocks import parse_content_blocks, to_content_blocks

PICTURE = {"type": "image", "data": b64encode(b"\x89PNG").decode(), "mimeType": "image/png"}
SHOWN = Image(b"\x89PNG")


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_content_survives_the_round_trip() -> None:
    content = (Text("a"), SHOWN, Text("b"))
    assert parse_content_blocks(to_content_blocks(content), max_characters=2) == content
    assert parse_content_blocks(to_content_blocks("a"), max_characters=1) == "a"


def test_texts_beside_an_image_share_one_budget() -> None:
    sent = [_text("aaaa"), PICTURE, *[_text("bbbb")] * 500]
    note = Text("\n(cut: the first 6 of 2,004 characters; ask for less)")
    assert parse_content_blocks(sent, max_characters=6) == (Text("aaaa"), SHOWN, Text("bb"), note)
    assert parse_content_blocks(sent, max_characters=4) == (
        Text("aaaa"),
        SHOWN,
        Text("\n(cut: the first 4 of 2,004 characters; ask for less)"),
    )


def test_images_share_one_budget_and_the_rest_are_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "MAX_IMAGE_BYTES", 9)
    named = Text("(image not shown: 4 bytes, over 9 a result; ask for less)")
    assert parse_content_blocks([PICTURE] * 3, max_characters=99) == (SHOWN, SHOWN, named)
    many = parse_content_blocks([PICTURE] * 99, max_characters=10)
    assert many[:3] == (SHOWN, SHOWN, Text("(image not"))
    assert len(many) == 4, "what is said of them is cut like any other text"
    monkeypatch.setattr(blocks, "MAX_IMAGE_BYTES", 3)
    assert str(parse_content_blocks([PICTURE], max_characters=10)).startswith(
        "(image not\n(cut: the first"
    )


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "resource", "resource": {"text": "inside"}}, "inside"),
        ({"type": "resource", "resource": "file:///a"}, "(resource not shown: no description)"),
        ({"type": "resource", "resource": {"mimeType": "a/b"}}, "(resource not shown: a/b)"),
        ({"type": "audio", "mimeType": "audio/wav"}, "(audio not shown: audio/wav)"),
        ({"type": "resource_link", "uri": "file:///a"}, "(resource_link not shown: file:///a)"),
        ("bare", "bare"),
        (["a", 1], '["a", 1]'),
    ],
)
def test_blocks_that_a_message_cannot_hold_are_described(block: Any, text: str) -> None:
    assert parse_content_blocks([block], max_characters=99) == text
