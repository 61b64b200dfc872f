"""Values and errors of an environment's code: describe them, and convert them to plain Python values.

Scalars of numpy and torch become Python's, lists become tuples, subclasses become their base class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from math import isfinite
from numbers import Real
from reprlib import Repr
from typing import Any, TypeVar

from skyfleet.errors import EnvError, EpisodeError

_SHOWN_CHARACTERS = 100
MAX_DETAIL_CHARACTERS = 2_000
"""Of an exception's text that is recorded."""
MAX_JSON_CHARACTERS = 1_000_000
"""Of one tool's schema or one call's arguments."""
MAX_JSON_DEPTH = 100

T = TypeVar("T")

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


def is_finite(number: object) -> bool:
    """Whether it is a finite real number; numpy's scalars count as numbers."""
    try:
        return isinstance(number, Real) and isfinite(number)
    except OverflowError:  # an integer larger than any float
        return False


def unwrap(value: Any) -> Any:
    """The Python value of a scalar of numpy or torch, without importing either."""
    if type(value) in (float, int, bool, str) or value is None:
        return value
    shape = getattr(value, "shape", None)
    item = getattr(value, "item", None)
    if shape is not None and callable(item) and all(length == 1 for length in shape):
        return item()
    return value


def convert_bool(value: object, where: str, kind: type[EpisodeError]) -> bool:
    if type(value) is bool:
        return value
    value = unwrap(value)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise kind(f"{where} is {format_value(value)}; return True or False")


def convert_count(value: object, where: str) -> int | None:
    value = unwrap(value)
    if value is None or (type(value) is int and value >= 0):
        return value
    raise EnvError(f"{where} is {format_value(value)}; return None or a number of turns")


def convert_text(value: object, where: str, kind: type[EpisodeError] = EnvError) -> str:
    if type(value) is str:
        return value
    if isinstance(value, str):
        # Not str(value): a subclass may override __str__.
        return str.__str__(value)
    raise kind(f"{where} is {format_value(value)}, not a text; convert it with str(...)")


def convert_items(
    given: object, where: str, limit: int, convert: Callable[[Any], T]
) -> tuple[T, ...]:
    """A tuple of converted items: the same tuple if nothing changed."""
    if not isinstance(given, tuple | list):
        raise EnvError(f"{where} is {format_value(given)}; return a tuple")
    items = given if type(given) is tuple else tuple(islice(given, limit + 1))
    if len(items) > limit:
        raise EnvError(f"{where} has {len(items):,} entries, more than {limit:,}; return fewer")
    converted = tuple([convert(item) for item in items])
    is_same = all(new is old for new, old in zip(converted, items, strict=True))
    return items if is_same else converted


def convert_json(value: object, where: str) -> dict[str, Any]:
    """A JSON object with plain values; numpy's scalars and tuples become JSON's."""
    if not isinstance(value, Mapping):
        raise EnvError(f"{where} is {format_value(value)}; return a mapping")
    budget = [MAX_JSON_CHARACTERS]
    plain = _to_plain(value, where, 0, budget)
    try:
        json.dumps(plain, allow_nan=False)
    except ValueError as error:
        raise EnvError(f"{where} is not JSON: {error}") from None
    assert isinstance(plain, dict)
    return plain


def _to_plain(value: Any, where: str, depth: int, budget: list[int]) -> Any:
    if isinstance(value, str):
        budget[0] -= len(value)
    else:
        budget[0] -= 1 + value.bit_length() // 3 if type(value) is int else 1
    if budget[0] < 0 or depth > MAX_JSON_DEPTH:
        raise EnvError(
            f"{where} is larger than {MAX_JSON_CHARACTERS:,} characters or deeper than "
            f"{MAX_JSON_DEPTH} levels; shorten it"
        )
    value = unwrap(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return convert_text(value, where)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {
            _to_key(key, where, budget): _to_plain(item, where, depth + 1, budget)
            for key, item in islice(value.items(), MAX_JSON_CHARACTERS)
        }
    if isinstance(value, tuple | list):
        return [_to_plain(item, where, depth + 1, budget) for item in value]
    raise EnvError(f"{where} has {format_value(value)}, which is not JSON; convert it")


def _to_key(key: object, where: str, budget: list[int]) -> str:
    key = unwrap(key)
    if isinstance(key, str):
        budget[0] -= len(key)
        return convert_text(key, where)
    if isinstance(key, bool | int | float) or key is None:
        return json.dumps(key)  # as JSON itself writes such a key
    raise EnvError(f"{where} has the key {format_value(key)}; use texts as keys")
