"""Exit although code of an environment never ends: Python would wait for its threads."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from skyfleet.streams import restore_streams


def exit_stuck(code: str | int | None) -> None:
    """Exit at once, after what is registered for the exit, if something would keep the process."""
    event_loop = sys.modules.get("skyfleet.envs.event_loop")  # unless no episode was played
    if event_loop is None or not event_loop.has_stuck_code():
        return
    exit_at_once(code)


def exit_at_once(code: str | int | None) -> NoReturn:
    """Exit after what is registered for the exit, whatever still runs in other threads."""
    restore_streams()
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)
