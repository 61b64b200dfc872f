"""Detect environments that block the event loop, and interrupt those whose time is over.

A blocking call in an async method stops every episode. `EnvGuard` measures how long the environment
held the loop each time it ran, and gives that time back to the other episodes. The thread of
`envs/watchdog.py` samples where a long one is, and interrupts it when its episode's limit is over.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread, current_thread, get_ident, main_thread
from time import perf_counter
from types import FrameType
from typing import Any, Protocol, TypeGuard
from weakref import WeakKeyDictionary, ref

from skyfleet.trajectories.episode_clock import EpisodeClock, running_clocks

if sys.platform == "linux":
    from time import clock_gettime

logger = logging.getLogger(__name__)

STALL_SECONDS = 0.25
"""How long an environment may hold the event loop before it counts as blocking."""
WATCH_SECONDS = 0.1
_THREAD_CLOCK = 6
"""Linux: the flags of a clock that counts the processor time of one thread."""
_INTERRUPT_SECONDS = 1.0
"""Between two attempts to interrupt a call."""
_SIGNAL = signal.SIGVTALRM
"""Interrupts a system call of the main thread; nothing else here uses this signal."""

_PACKAGE = str(Path(__file__).parents[1])
_GUARD_FILES = tuple(
    str(Path(__file__).with_name(f"{name}.py")) for name in ("guard", "guarded_call")
)
"""Their frames are between an environment and the event loop."""
_LOOP_FILES = tuple(
    str(Path(asyncio.__file__).with_name(f"{name}.py"))
    for name in ("events", "base_events", "runners")
)
"""Their frames call the callbacks of an event loop."""
_LIBRARIES = (str(Path(asyncio.__file__).parents[1]), "<")
"""An environment's own line says more than that of the library it called."""


class EnvInterrupt(BaseException):
    """Raised inside an environment that blocks a thread after the limit of its episode."""


def is_interrupted(error: BaseException | None) -> TypeGuard[BaseException]:
    """Whether a call failed because it held its thread after the limit of its episode."""
    return error is not None and isinstance(error.__cause__, EnvInterrupt)


class Holder(Protocol):
    """The guard of an environment that holds an event loop or a thread."""

    env_key: str
    task_key: str
    during: str
    clock: EpisodeClock | None

    def has_expired(self, held_seconds: float) -> bool: ...

    def report_stall(
        self, seconds: float, line: str, *, holds_interpreter: bool = False
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    line: str
    """Where the environment was, as `file:line`; empty if nobody could look."""
    holds_interpreter: bool
    """No other thread could run."""


def read_cpu_seconds(thread: Thread) -> float:
    """The processor time of a thread; 0 where the system does not say, or after its end."""
    if sys.platform != "linux" or thread.native_id is None:
        return 0.0
    # The clock that pthread_getcpuclockid returns, which is undefined for a thread that has ended.
    with suppress(OSError):
        return clock_gettime((~thread.native_id << 3) | _THREAD_CLOCK)
    return 0.0


_collections: deque[tuple[float, float]] = deque(maxlen=16)
"""When long garbage collections ended, and their seconds."""
_collection_start = 0.0


def time_collection(phase: str, _info: dict[str, int]) -> None:
    """A callback of the garbage collector."""
    global _collection_start
    now = perf_counter()
    if phase == "start":
        _collection_start = now
    elif now - _collection_start > WATCH_SECONDS:
        _collections.append((now, now - _collection_start))


gc.callbacks.append(time_collection)


def _sum_collections(seconds: float) -> float:
    """How much of the last `seconds` garbage collections took."""
    start = perf_counter() - seconds - WATCH_SECONDS
    return sum(took for end, took in _collections if end > start)


class LoopMonitor:
    """What runs in one event loop: the guard that holds it now, and since when."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.thread_id, self._thread = ref(loop), get_ident(), current_thread()
        self.is_main = self._thread is main_thread()
        self.running: Holder | None = None
        self.since = 0.0
        self._lines: list[str] = []
        """Where the running call was each time the watchdog looked."""
        self._cpu_seconds = read_cpu_seconds(self._thread)
        """Of the loop's thread, when the watchdog looked last."""
        self.lock = Lock()
        """Held while the watchdog interrupts, so that no interrupt is left for others."""
        self.interrupts = 0
        self._is_tracing = False
        self._tracer: Any = None
        """The trace function of a debugger or of coverage, while ours is set."""
        self._last_interrupt = 0.0
        self.n_episodes = 0
        self.is_watched = False
        self.is_isolated = False
        """Whether the loop runs one environment and nothing else."""
        self.idle_since = perf_counter()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        # A weak reference: monitors are kept by loop, and would keep the loop.
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        return loop

    def start(self, guard: Holder) -> float:
        self.since = since = perf_counter()
        self.running = guard
        return since

    def stop(self) -> float:
        """The environment no longer holds the loop."""
        self.running = None
        if self.interrupts:
            self._clear_interrupts()
        return perf_counter()

    def explain_stall(self, seconds: float) -> Stall | None:
        """What the environment did; None if it was not running: the machine was busy, or Python
        collected garbage, which it does in whatever code reaches the threshold.

        Either the watchdog found it in its own code twice, or the watchdog could not run, because
        the environment computed without releasing the interpreter lock.
        """
        lines, self._lines = self._lines, []
        if _sum_collections(seconds) > seconds / 2:
            return None
        if len(lines) > 1:
            return Stall(line=lines[-1], holds_interpreter=False)
        is_computing = self.read_computed_seconds() > seconds / 2
        return Stall(line="", holds_interpreter=True) if is_computing else None

    def read_computed_seconds(self) -> float:
        """How much the loop's thread has computed since the watchdog looked last."""
        return read_cpu_seconds(self._thread) - self._cpu_seconds

    def _clear_interrupts(self) -> None:
        with self.lock:
            self.interrupts = 0
            if not self.is_main:
                _set_exception(self.thread_id, None)
        if self._is_tracing:
            sys.settrace(self._tracer)
            self._is_tracing = False

    def watch(self, now: float) -> None:
        """Called by the watchdog thread."""
        guard, since = self.running, self.since
        if guard is None or now - since < WATCH_SECONDS:
            self._lines = []
            self._cpu_seconds = read_cpu_seconds(self._thread)
            return
        if line := find_line(self.thread_id):
            self._lines.append(line)
        if guard.has_expired(now - since) and now - self._last_interrupt > _INTERRUPT_SECONDS:
            with self.lock:
                if self.running is guard and self.since == since:
                    self._last_interrupt = now
                    self.interrupts += 1
                    self._interrupt()

    def _interrupt(self) -> None:
        if self.is_main:
            signal.pthread_kill(self.thread_id, _SIGNAL)
        else:
            _set_exception(self.thread_id, EnvInterrupt)

    def handle_signal(self, frame: FrameType | None) -> None:
        """Raise inside the environment. Runs in the main thread, so `running` is exact."""
        if self.running is None or not self.interrupts:
            return
        if self.interrupts > 1 and not self._is_tracing:
            # It caught the first one. This one is raised again at the next line, which is outside
            # the `try` that catches it.
            self._is_tracing, self._tracer = True, sys.gettrace()
            sys.settrace(self._trace)
            while frame is not None and frame.f_code.co_filename != __file__:
                frame.f_trace = self._trace
                frame = frame.f_back
        raise EnvInterrupt

    def _trace(self, frame: FrameType, event: str, value: Any) -> Any:
        if self.running is None or frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            raise EnvInterrupt
        return self._trace


_monitors: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMonitor] = WeakKeyDictionary()
_main_monitor: list[LoopMonitor] = []
_warned: set[tuple[str, str]] = set()


def find_monitor() -> LoopMonitor:
    """The monitor of the running event loop."""
    loop = asyncio.get_running_loop()
    monitor = _monitors.get(loop)
    if monitor is None:
        _monitors[loop] = monitor = LoopMonitor(loop)
        if monitor.is_main:
            _main_monitor[:] = [monitor]
    return monitor


def give_back(seconds: float, *, except_for: Iterable[object] = ()) -> None:
    """Extend the clocks of all episodes in this loop but the culprits'."""
    culprits = set(map(id, except_for))
    for clock in running_clocks():
        if id(clock) not in culprits:
            clock.extend(seconds)


def log_stall(guard: Holder, seconds: float, line: str, *, holds_interpreter: bool) -> None:
    """Name the environment and what it did, once for each of its methods."""
    if (guard.env_key, guard.during) in _warned:
        return
    _warned.add((guard.env_key, guard.during))
    where = f" at {line}" if line else ""
    what = "the interpreter lock" if holds_interpreter else "the event loop"
    logger.warning(
        "environment %s held %s for %.1f s in %s%s (task %s); the other episodes get the time "
        "back. Await what takes long, or set environment.isolation to %s",
        guard.env_key,
        what,
        seconds,
        guard.during,
        where,
        guard.task_key,
        "process" if holds_interpreter else "thread",
    )


def find_callback(thread_id: int) -> str | None:
    """The line of a callback that the event loop of the thread runs; None if it runs a task of ours.

    Empty if the callback is no Python code.
    """
    frame = sys._current_frames().get(thread_id)
    line = ""
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        name = frame.f_code.co_filename
        if name in _LOOP_FILES:
            return line
        if not line and not name.startswith(_LIBRARIES):
            line = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def find_line(thread_id: int) -> str:
    """The line of the environment that the thread is in, as `file:line`; empty if in none."""
    frame = sys._current_frames().get(thread_id)
    found: FrameType | None = None
    while frame is not None and frame.f_code.co_filename not in _GUARD_FILES:
        if not frame.f_code.co_filename.startswith((_PACKAGE, *_LIBRARIES)):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        found = found or frame
        frame = frame.f_back
    if found is None or frame is None:
        return ""
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"


def interrupt_thread(thread_id: int) -> None:
    """Raise EnvInterrupt in a thread that runs nothing but an environment, at its next bytecode."""
    _set_exception(thread_id, EnvInterrupt)


def _set_exception(thread_id: int, kind: type[BaseException] | None) -> None:
    value: Any = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), value)


def install_handler() -> None:
    if signal.getsignal(_SIGNAL) is not _handle:
        signal.signal(_SIGNAL, _handle)


def _handle(signum: int, frame: FrameType | None) -> None:
    if _main_monitor:
        _main_monitor[0].handle_signal(frame)
