"""FrozenState: a database that nobody can change, so what was read of it once need not be again."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class FrozenState(sqlite3.Connection):
    """Remembers answers as long as it lives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known: dict[object, Any] = {}


MOST_STATES = 256
_states: OrderedDict[bytes, FrozenState] = OrderedDict()


def frozen_state(image: bytes) -> FrozenState:
    """The state of an image: the same one for everybody who asks.

    It is closed once so many others were asked for since.
    """
    if image not in _states:
        _states[image] = _frozen(image)
    _states.move_to_end(image)
    if len(_states) > MOST_STATES:
        _, oldest = _states.popitem(last=False)
        oldest.close()
    return _states[image]


def _frozen(image: bytes) -> FrozenState:
    state = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, factory=FrozenState
    )
    state.deserialize(image)
    state.execute("pragma query_only = on")
    return state


def remembered(
    connection: sqlite3.Connection, ask: Callable[[sqlite3.Connection, str], T], about: str
) -> T:
    """What `ask(connection, about)` says; of a frozen state it is asked once."""
    if not isinstance(connection, FrozenState):
        return ask(connection, about)
    key = (ask, about)
    if key not in connection.known:
        connection.known[key] = ask(connection, about)
    answer: T = connection.known[key]
    return answer
