"""SIGTERM and SIGHUP in a Python program that trains: save a checkpoint, then exit as the signal says."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_received: list[signal.Signals] = []
_n_waiting = 0


@contextmanager
def exit_after_saving() -> Iterator[None]:
    """SIGTERM, which clusters send to end a job, ends what runs inside as Ctrl-C does, with 128 + N.

    So does SIGHUP, which a closed terminal sends. A signal that the program handles or ignores (nohup)
    is left to it; so are all signals outside the main thread.
    """
    if current_thread() is not main_thread():
        yield
        return
    handled = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _handle)
    try:
        yield
    finally:
        if handled:
            _received.clear()
        for number in handled:
            if signal.getsignal(number) is _handle:  # the program may have set its own meanwhile
                signal.signal(number, signal.SIG_DFL)


def _handle(number: int, frame: FrameType | None) -> None:
    if not _n_waiting:
        raise SystemExit(128 + number)  # in the body of a Trainer's loop; the Trainer saves
    _received.append(signal.Signals(number))


@contextmanager
def wait_for_signals() -> Iterator[None]:
    """The main thread waits for the background loop: a signal is noted, `take_signal` returns it."""
    global _n_waiting
    is_main = current_thread() is main_thread()
    _n_waiting += is_main
    try:
        yield
    finally:
        _n_waiting -= is_main


def take_signal() -> signal.Signals | None:
    """The signal that has arrived while the main thread waited, once; later ones are dropped."""
    if not _received or current_thread() is not main_thread():
        return None
    first = _received[0]
    _received.clear()
    return first
