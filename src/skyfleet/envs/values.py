"""Describe values and errors of an environment's code, whatever they are and however large."""

from __future__ import annotations

from reprlib import Repr

_SHOWN_CHARACTERS = 100
MAX_DETAIL_CHARACTERS = 2_000
"""Of an exception's text that is recorded."""

_repr = Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _SHOWN_CHARACTERS


def format_value(value: object) -> str:
    """A short repr that neither raises nor builds a large string."""
    if isinstance(value, bytes | bytearray):
        value = bytes(value[:_SHOWN_CHARACTERS])
    try:
        return _repr.repr(value)[:_SHOWN_CHARACTERS]
    except BaseException:
        return f"a {type(value).__name__}"


def describe_error(error: BaseException) -> str:
    """`ValueError: the text`, cut if it is long; an exception may fail to describe itself."""
    try:
        text = str(error)
    except BaseException:
        text = "(it has no text)"
    # Exact strings only: a subclass may misbehave later.
    text = str.__str__(text)
    if len(text) > MAX_DETAIL_CHARACTERS:
        text = f"{text[:MAX_DETAIL_CHARACTERS]} (cut: {len(text):,} characters)"
    return f"{type(error).__name__}: {text}"
