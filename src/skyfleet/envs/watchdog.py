"""The watchdog: one thread that looks at all event loops which run episodes.

It samples and interrupts calls that block (`envs/stalls.py`), and finds time that no call accounts
for: callbacks that block a loop, threads that hold the interpreter lock, a process that was stopped.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from threading import Event, Lock, Thread
from time import perf_counter

from skyfleet.envs.stalls import (
    STALL_SECONDS,
    WATCH_SECONDS,
    Holder,
    LoopMonitor,
    find_callback,
    give_back,
    install_handler,
    read_cpu_seconds,
)

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 1.0
"""The watchdog thread ends after so long without an episode."""


class _InThread:
    """The thread that runs an environment's code, and how much it has computed."""

    def __init__(self, thread: Thread) -> None:
        self._thread = thread
        self._seconds = self._latest = read_cpu_seconds(thread)

    def measure(self) -> None:
        """Called by the watchdog each time it looks."""
        self._seconds, self._latest = self._latest, read_cpu_seconds(self._thread)

    @property
    def computed_seconds(self) -> float:
        """Between the last two times that the watchdog looked."""
        return self._latest - self._seconds


_in_threads: dict[Holder, _InThread] = {}
"""Environments whose blocking code runs in a thread now."""
_warned_lines: set[str] = set()


def enter_thread(guard: Holder | None, thread: Thread) -> None:
    if guard is not None:
        _in_threads[guard] = _InThread(thread)


def leave_thread(guard: Holder | None) -> None:
    if guard is not None:
        _in_threads.pop(guard, None)


def _give_back_lost(seconds: float, computed_seconds: float) -> None:
    """The watchdog could not run for so long; the loop's thread computed for `computed_seconds`.

    A thread that computed all the time held the interpreter lock. If none did, the process was
    stopped or the machine was busy, which is nobody's time.
    """
    culprits = [
        guard for guard, state in _in_threads.items() if state.computed_seconds > seconds / 2
    ]
    if not culprits and computed_seconds > seconds / 2:
        return  # code in this loop; what an environment holds is measured when it runs
    give_back(seconds, except_for=[guard.clock for guard in culprits])
    if len(culprits) == 1:
        culprits[0].report_stall(seconds, "", holds_interpreter=True)


class _CallbackTimer:
    """Measures how long callbacks hold one event loop; no environment's call accounts for them.

    A callback of an environment cannot be distinguished from others, so all episodes get the time back.
    """

    def __init__(self, monitor: LoopMonitor) -> None:
        self._monitor, self._asked = monitor, False
        self._n_looks = 0
        self._lines: list[str] = []
        """Where the callback was each time the watchdog found one."""

    def look(self, now: float) -> None:
        """Ask the loop to answer, or look why it has not. Called by the watchdog thread."""
        if not self._asked:
            self._asked, self._n_looks, self._lines = True, 0, []
            self._monitor.loop.call_soon_threadsafe(self._answer, now)
            return
        self._n_looks += 1
        if self._monitor.running is None:
            line = find_callback(self._monitor.thread_id)
            if line is not None:
                self._lines.append(line)

    def _answer(self, asked: float) -> None:
        self._asked, lines = False, self._lines
        late = perf_counter() - asked
        if late < STALL_SECONDS or len(lines) < 2:
            return
        seconds = late * min(1.0, len(lines) / max(1, self._n_looks))
        give_back(seconds)
        line = lines[-1]
        if line not in _warned_lines:
            _warned_lines.add(line)
            logger.warning(
                "code that no episode called, such as a callback,%s held the event loop for %.1f s; "
                "all episodes get the time back. Run what takes long in a thread",
                f" at {line}," if line else "",
                seconds,
            )


class _Watchdog:
    """One thread for all event loops; it ends when no episode runs."""

    def __init__(self) -> None:
        self._lock, self._wake = Lock(), Event()
        self._monitors: dict[LoopMonitor, _CallbackTimer] = {}
        self._thread: Thread | None = None

    def add(self, monitor: LoopMonitor) -> None:
        """Watch the loop while it runs episodes, and a moment longer: short ones follow at once."""
        monitor.n_episodes += 1
        if monitor.is_watched:
            return
        if monitor.is_main:
            install_handler()
        with self._lock:
            monitor.is_watched = True
            self._monitors[monitor] = _CallbackTimer(monitor)
            if self._thread is None:
                self._thread = Thread(target=self._watch, name="skyfleet watchdog", daemon=True)
                self._thread.start()

    def remove(self, monitor: LoopMonitor) -> None:
        monitor.n_episodes -= 1

    def _watch(self) -> None:
        last = perf_counter()
        while True:
            self._wake.wait(WATCH_SECONDS)
            now = perf_counter()
            late, last = now - last - WATCH_SECONDS, now
            with self._lock:
                for monitor in tuple(self._monitors):
                    if monitor.n_episodes:
                        monitor.idle_since = now
                    elif now - monitor.idle_since > _IDLE_SECONDS:
                        monitor.is_watched = False
                        del self._monitors[monitor]
                monitors = tuple(self._monitors.items())
                if not monitors:
                    self._thread = None
                    return
            for state in tuple(_in_threads.values()):
                state.measure()
            for monitor, callbacks in monitors:
                # A loop may be closed and its thread may end while this runs.
                with suppress(OSError, RuntimeError):
                    if late > STALL_SECONDS and monitor.running is None:
                        computed = monitor.read_computed_seconds()
                        monitor.loop.call_soon_threadsafe(_give_back_lost, late, computed)
                    monitor.watch(now)
                    if not monitor.is_isolated:
                        callbacks.look(now)


_watchdog = _Watchdog()
watch, unwatch = _watchdog.add, _watchdog.remove
