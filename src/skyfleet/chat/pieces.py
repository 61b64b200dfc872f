"""Encode text and special tokens so that text never becomes a special token.

A tool result may contain the text `<|im_end|>`. It stays text: only a renderer can place a special
token, and no message can end a turn or begin another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache

from skyfleet.chat.tokenizer import Tokenizer, encode_text, find_single_token


class SpecialToken(str):
    """A single token if the tokenizer has it as one; otherwise ordinary text."""

    __slots__ = ()


_MAX_CACHED_CHARACTERS = 16_384

THINK, END_THINK = SpecialToken("<think>"), SpecialToken("</think>")


class PieceEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: dict[SpecialToken, int | None] = {}
        # Attempts at one task share their prompt, and tokenizing dominates the cost of rendering it.
        # An array takes a tenth of the memory of a tuple; the cache holds tens of megabytes at most.
        self._cached_tokens = lru_cache(maxsize=512)(self._text_tokens)

    def __call__(self, pieces: Iterable[str]) -> list[int]:
        """The text between two special tokens is encoded at once, as in the whole conversation."""
        token_ids: list[int] = []
        text: list[str] = []
        for piece in pieces:
            token_id = self.token(piece) if isinstance(piece, SpecialToken) else None
            if token_id is None:
                text.append(piece)
            else:
                token_ids += [*self._encode_text(text), token_id]
                text.clear()
        return [*token_ids, *self._encode_text(text)]

    def token(self, token: SpecialToken) -> int | None:
        """The id of a special token, or None if the tokenizer splits it."""
        if token not in self._token_ids:
            self._token_ids[token] = find_single_token(self._tokenizer, token)
        return self._token_ids[token]

    def _encode_text(self, text: list[str]) -> Iterable[int]:
        joined = "".join(text)
        if len(joined) > _MAX_CACHED_CHARACTERS:
            return self._text_tokens(joined)
        return self._cached_tokens(joined) if joined else ()

    def _text_tokens(self, text: str) -> array[int]:
        return array("i", encode_text(self._tokenizer, text))
