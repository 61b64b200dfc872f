"""Tokenizer: what a renderer needs of one; Hugging Face's fast tokenizers have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    def encode(
        self, text: str, /, *, add_special_tokens: bool, split_special_tokens: bool = False
    ) -> list[int]: ...

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> Any:
        """A string; Hugging Face's type also allows for batches."""
        ...


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that a template wrote: its special tokens are special."""
    return tokenizer.encode(_sound(text), add_special_tokens=False)


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of mere words: what looks like a special token is spelled out."""
    return tokenizer.encode(_sound(text), add_special_tokens=False, split_special_tokens=True)


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    return text


def single_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The one token that is exactly `text`, or None."""
    token_ids = encode(tokenizer, text)
    is_one = len(token_ids) == 1 and decode(tokenizer, token_ids) == text
    return token_ids[0] if is_one else None


def _sound(text: str) -> str:
    # A tool may answer with half a surrogate pair, which no tokenizer takes; it becomes "?".
    return text.encode(errors="replace").decode()
