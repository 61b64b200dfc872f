"""Plain pickle: the texts, numbers and containers of a pickle, read without unpickling it.

Unpickling runs whatever the sender wrote. Here the opcodes are only looked at, and one that would
make anything but plain data is refused.
"""

from __future__ import annotations

from pickletools import genops
from typing import Any

_WORDS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_EMPTY: dict[str, type[Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_SKIPPED = ("PROTO", "FRAME", "STOP")


def read_plain(data: bytes) -> Any:
    """What the pickle holds; ValueError where that is more than plain data, or no pickle."""
    reader = _Reader()
    try:
        for opcode, argument, _ in genops(data):
            reader.take(opcode.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a pickle: {error!r}") from error
    if len(reader.stack) != 1:
        raise ValueError(f"not a pickle of one value but of {len(reader.stack)}")
    return reader.stack[0]


class _Reader:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: list[Any] = []

    def take(self, name: str, argument: Any) -> None:
        if name in _NUMBERS or name in _TEXTS:
            self.stack.append(argument)
        elif name in _WORDS:
            self.stack.append(_WORDS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name == "MEMOIZE":
            self._memo.append(self.stack[-1])
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name == "MARK":
            self._outer.append(self.stack)
            self.stack = []
        elif name not in _SKIPPED:
            self._gather(name)

    def _gather(self, name: str) -> None:
        if name in _SHORT_TUPLES:
            self.stack.append(tuple(self._last(_SHORT_TUPLES[name])))
        elif name == "TUPLE":
            items = self._since_mark()
            self.stack.append(tuple(items))
        elif name in ("APPEND", "APPENDS"):
            items = self._last(1) if name == "APPEND" else self._since_mark()
            self.stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._last(2) if name == "SETITEM" else self._since_mark()
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
        else:
            raise ValueError(f"the pickle has {name}; send texts, numbers, lists and dicts only")

    def _last(self, count: int) -> list[Any]:
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._outer.pop()
        return items
