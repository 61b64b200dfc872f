"""Guard: what a message spells stays text, whatever template it is rendered by.

A template writes words and marks into one string, where nobody can tell them apart. So a spelling
of a special token is broken up before, and mended when the tokens are made.
"""

from __future__ import annotations

import re

from skyfleet.chat.pieces import END_THINK, THINK, Mark, PieceEncoder
from skyfleet.chat.template import TemplateTokenizer
from skyfleet.chat.tokenizer import encode

_INSIDE = "\ufdd0"  # a noncharacter of Unicode: no text holds it


class Guard:
    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        longest_first = sorted(special, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._tokenizer, self._encode = tokenizer, PieceEncoder(tokenizer)

    def spell(self, text: str) -> str:
        return self._marks.sub(_broken_up, text)

    def encode(self, rendered: str) -> list[int]:
        """The tokens of what a template made of spelled texts."""
        if _INSIDE not in rendered:
            return encode(self._tokenizer, rendered)
        pieces = self._marks.split(rendered)  # a text and a mark in turn
        return self._encode(
            Mark(piece) if is_mark % 2 else piece.replace(_INSIDE, "")
            for is_mark, piece in enumerate(pieces)
        )


def _broken_up(found: re.Match[str]) -> str:
    mark = found[0]
    # Templates look for thoughts in what the assistant said.
    return mark if mark in (THINK, END_THINK) else mark[0] + _INSIDE + mark[1:]
