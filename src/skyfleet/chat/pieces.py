"""Pieces: text and marks, encoded so that no text ever becomes a mark.

Whoever writes a tool's answer may spell `<|im_end|>` in it. As text it stays text: only a renderer
can place a mark, and no message can end a turn or begin another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache

from skyfleet.chat.tokenizer import Tokenizer, encode_text, single_token


class Mark(str):
    """One token of its own where the tokenizer has it whole; elsewhere text like any other."""

    __slots__ = ()


_LONGEST_KEPT_CHARACTERS = 16_384

THINK, END_THINK = Mark("<think>"), Mark("</think>")


class PieceEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: dict[Mark, int | None] = {}
        # The attempts at a task open alike, and tokenizing is most of what opening costs. An array
        # is a tenth of a tuple of ints; some tens of megabytes are the most that is kept.
        self._kept_tokens = lru_cache(maxsize=512)(self._text_tokens)

    def __call__(self, pieces: Iterable[str]) -> list[int]:
        """Text between two marks is encoded in one go, as it would be in the whole."""
        token_ids: list[int] = []
        text: list[str] = []
        for piece in pieces:
            token = self.token(piece) if isinstance(piece, Mark) else None
            if token is None:
                text.append(piece)
            else:
                token_ids += [*self._encoded(text), token]
                text.clear()
        return [*token_ids, *self._encoded(text)]

    def token(self, mark: Mark) -> int | None:
        if mark not in self._tokens:
            self._tokens[mark] = single_token(self._tokenizer, mark)
        return self._tokens[mark]

    def _encoded(self, text: list[str]) -> Iterable[int]:
        joined = "".join(text)
        if len(joined) > _LONGEST_KEPT_CHARACTERS:
            return self._text_tokens(joined)
        return self._kept_tokens(joined) if joined else ()

    def _text_tokens(self, text: str) -> array[int]:
        return array("i", encode_text(self._tokenizer, text))
