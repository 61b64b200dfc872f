"""A clock that stops while a thread waits for a core that other processes have."""

from __future__ import annotations

import threading
from pathlib import Path
from time import perf_counter

LEARNER_THREAD = "learner"
"""Begins the name of the thread of `ThreadedLearner`."""


def read_core_wait(thread: threading.Thread | None = None) -> float:
    """Seconds that a thread of this process, by default the main one, was ready and had no core.

    As Linux counts them; 0 elsewhere.
    """
    number = (thread or threading.main_thread()).native_id
    try:
        text = Path(f"/proc/self/task/{number}/schedstat").read_text("ascii")
    except OSError:
        return 0.0
    return int(text.split()[1]) / 1e9


def find_learner_thread() -> threading.Thread | None:
    names = (one for one in threading.enumerate() if one.name.startswith(LEARNER_THREAD))
    return next(names, None)


def read_quiet_clock() -> float:
    """Seconds of the wall, without the longer wait of the main thread's and the learner's."""
    learner = find_learner_thread()
    waits = [read_core_wait(), read_core_wait(learner) if learner else 0.0]
    return perf_counter() - max(waits)
