"""Run asyncio code in virtual time: the clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from selectors import SelectorKey, SelectSelector
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(SelectSelector):
    """Waits for nothing; remembers how long it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never happens")
        self.seconds += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Every wait on a timer takes no time; there is no input, output or thread."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.seconds


def run_in_virtual_time(simulated: Coroutine[Any, Any, T]) -> T:
    """The result of `simulated`, whose `asyncio.sleep` takes no time; no event loop may be running."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(simulated)
