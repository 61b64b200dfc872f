"""Know which parts of a verifier's output its own source wrote, and which parts are values.

A verifier prints its result lines (`>>> SUCCESS_ACCUMULATOR >>>`, `App mail: 1`, `JUDGE ERROR:`)
on the same stream as texts that it quotes, and an agent chooses those. So the strings of the
source are compiled to `SourceText` (`source_tracking.py`), which remembers what was literal and
what was inserted. The jail worker imports this module without site-packages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

_TOKEN = re.compile(r"\0(\d+)\0")
_MARK = "\0"
_NUMBERS = (int, float)

WORDS = frozenset({"success", "error", "0", "1", "0.0", "1.0"})
"""Strings of the source that complete a result line, in any case: `>>> {kind}_ACCUMULATOR >>>`."""


class SourceText(str):
    """A string with its skeleton: literal parts as they are, each inserted value as a token."""

    __slots__ = ("skeleton", "tracker")

    skeleton: str
    tracker: Tracker

    def __add__(self, other: Any, /) -> Any:
        return self.tracker.concatenate(self, other)

    def __radd__(self, other: Any, /) -> Any:
        return self.tracker.concatenate(other, self)

    def upper(self) -> SourceText:
        return self.tracker.make(str.upper(self), self.skeleton.upper())


class Tracker:
    """Makes SourceText while one verifier runs; compiled source calls it as `__source_text__`."""

    def __init__(self) -> None:
        self._values: list[object] = []
        self._known: dict[str, str] = {}

    def make(self, text: str, skeleton: str) -> SourceText:
        made = SourceText(text)
        made.skeleton, made.tracker = skeleton, self
        return made

    def literal(self, text: str) -> SourceText:
        return self.make(text, text.replace(_MARK, ""))

    def skeleton_of(self, value: object) -> str:
        """Return literal parts and numbers as they are.

        Any other value is a token, so no text of an agent has a line, a marker or a number in it.
        """
        if isinstance(value, SourceText):
            return value.skeleton
        if type(value) in _NUMBERS:
            return str(value)
        if isinstance(value, str):
            text = str(value)
            if text not in self._known:
                # The same text is the same token: an app is found by its name in two lines.
                self._known[text] = self._keep(text)
            return self._known[text]
        # Of a list only the length counts, as it is now.
        return self._keep(Entries(list.__len__(value)) if isinstance(value, list) else str(value))

    def _keep(self, value: object) -> str:
        self._values.append(value)
        return f"{_MARK}{len(self._values) - 1}{_MARK}"

    def find_value(self, skeleton: str) -> object:
        """Return the value if the skeleton is exactly one token, else the skeleton itself."""
        found = _TOKEN.fullmatch(skeleton)
        return self._values[int(found[1])] if found else skeleton

    def expand(self, skeleton: str) -> str:
        """Put the values back."""
        return _TOKEN.sub(lambda found: str(self._values[int(found[1])]), skeleton)

    # What compiled source calls:

    def interpolate(self, *parts: object) -> SourceText:
        return self.make("".join(map(str, parts)), "".join(map(self.skeleton_of, parts)))

    def insert(self, value: object, conversion: int, spec: str) -> object:
        """Format one value of an f-string; a list keeps its length, a number its text."""
        convert = _CONVERSIONS.get(conversion)
        text = format(convert(value) if convert else value, spec)
        if isinstance(value, SourceText) and text == value:
            return value
        is_whole = isinstance(value, list) and not spec
        return self.make(text, self.skeleton_of(value)) if is_whole else self._insert(value, text)

    def _insert(self, value: object, text: str) -> object:
        is_number = type(value) in (*_NUMBERS, bool) and "\n" not in text
        return self.make(text, text) if is_number else text

    def concatenate(self, left: Any, right: Any) -> Any:
        plain = [str(one) if isinstance(one, SourceText) else one for one in (left, right)]
        total = plain[0] + plain[1]
        if not isinstance(left, SourceText) and not isinstance(right, SourceText):
            return total
        return self.make(total, self.skeleton_of(left) + self.skeleton_of(right))

    def join(self, separator: str, items: Iterable[str]) -> str:
        items = list(items)
        text = str.join(separator, items)
        return self.make(text, separator.join(map(self.skeleton_of, items)))

    def format(self, template: str, *values: object, **named: object) -> str:
        text = str.format(template, *values, **named)
        try:
            skeleton = template.replace(_MARK, "").format(
                *map(self._quote, values), **{k: self._quote(v) for k, v in named.items()}
            )
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            return text  # a template that reads attributes or items: nothing in it counts
        return self.make(text, skeleton)

    def percent(self, template: str, values: Any) -> str:
        text = str.__mod__(template, values)
        quoted = tuple(map(self._quote, values)) if isinstance(values, tuple) else None
        try:
            skeleton = template.replace(_MARK, "") % (quoted or self._quote(values))
        except (KeyError, TypeError, ValueError):
            return text
        return self.make(text, skeleton)

    def _quote(self, value: object) -> object:
        return value if type(value) in _NUMBERS else _Quoted(self.skeleton_of(value))

    def render(self, show: Callable[..., str], value: object, **options: object) -> str:
        """`str(items)`, `repr(items)` and `json.dumps(items)` are still the list, or the number."""
        if show is str and isinstance(value, SourceText):
            return value
        text = show(value, **options)
        is_kept = isinstance(value, list) or type(value) in _NUMBERS
        is_kept = is_kept and show in (str, repr, json.dumps)
        return self.make(text, self.skeleton_of(value)) if is_kept else text

    def show_number(self, show: Callable[..., str], value: object) -> str:
        """`str(number)` outside a print, where the text of a list does not count."""
        return show(value) if isinstance(value, list) else self.render(show, value)


_CONVERSIONS: dict[int, Callable[[object], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}


class Entries(int):
    """The number of entries of a printed list."""


class _Quoted:
    def __init__(self, skeleton: str) -> None:
        self._skeleton = skeleton

    def __str__(self) -> str:
        return self._skeleton

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return self._skeleton
