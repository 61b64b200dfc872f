"""Tokenizer protocol, which Hugging Face's fast tokenizers satisfy, and helpers to encode text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    def encode(
        self, text: str, /, *, add_special_tokens: bool, split_special_tokens: bool = False
    ) -> list[int]: ...

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> Any:
        """Returns a string; Hugging Face's signature also allows batches."""
        ...


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode the output of a chat template, special tokens included."""
    return tokenizer.encode(_replace_surrogates(text), add_special_tokens=False)


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode plain text: what looks like a special token stays text."""
    return tokenizer.encode(
        _replace_surrogates(text), add_special_tokens=False, split_special_tokens=True
    )


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
