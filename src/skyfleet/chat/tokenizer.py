"""Tokenizer protocol, and encoding of text and special tokens."""

from __future__ import annotations

import copy
import threading
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary


class Tokenizer(Protocol):
    def encode(
        self, text: str, /, *, add_special_tokens: bool, split_special_tokens: bool = False
    ) -> list[int]: ...

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> Any:
        """Returns a string; Hugging Face's signature also allows batches."""
        ...


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode the output of a chat template, special tokens included."""
    return _own(tokenizer).encode(_replace_surrogates(text), add_special_tokens=False)


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode plain text: what looks like a special token stays text."""
    return _own(tokenizer).encode(
        _replace_surrogates(text), add_special_tokens=False, split_special_tokens=True
    )


class _OwnTokenizers(threading.local):
    copies: WeakKeyDictionary[Tokenizer, Tokenizer] | None = None


_of_thread = _OwnTokenizers()


def use_tokenizer_copies() -> None:
    """Let this thread encode with copies: `split_special_tokens` is a state of the tokenizer, so two
    threads that share one would encode each other's special tokens."""
    _of_thread.copies = WeakKeyDictionary()


def _own(tokenizer: Tokenizer) -> Tokenizer:
    copies = _of_thread.copies
    if copies is None:
        return tokenizer
    if tokenizer not in copies:
        copies[tokenizer] = copy.deepcopy(tokenizer)
    return copies[tokenizer]


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    return text


def find_single_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of the one token that is exactly `text`, or None."""
    token_ids = encode(tokenizer, text)
    is_one = len(token_ids) == 1 and decode(tokenizer, token_ids) == text
    return token_ids[0] if is_one else None


def _replace_surrogates(text: str) -> str:
    # A tool may return half a surrogate pair, which tokenizers reject; it becomes "?".
    return text.encode(errors="replace").decode()


class SpecialToken(str):
    """A single token if the tokenizer has it as one; otherwise ordinary text."""

    __slots__ = ()


_MAX_CACHED_CHARACTERS = 16_384

THINK, END_THINK = SpecialToken("<think>"), SpecialToken("</think>")


class PromptEncoder:
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
