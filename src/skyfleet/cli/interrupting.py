"""Ctrl-C, pressed once or twice, ends a command with one sentence and its exit code."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def cancelled_by_ctrl_c(work: Coroutine[Any, Any, T]) -> T:
    """The first cancels; the second is a KeyboardInterrupt in whichever of the tasks runs.

    It comes through here when the others have ended. Were it to leave this task, too, asyncio would
    print its traceback.
    """
    task = asyncio.current_task()
    assert task is not None
    try:
        return await work
    except BaseException as error:
        if task.cancelling() and _was_pressed(error):
            raise asyncio.CancelledError from None
        raise


def _was_pressed(error: BaseException | None) -> bool:
    """Imports, for one, may make another error of it."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return error is not None
    return _was_pressed(error.__cause__ or error.__context__)


def exit_interrupted(sentence: Callable[[], str], sent: signal.Signals = signal.SIGINT) -> NoReturn:
    """Said to its end; what Python still tidies up then is not told of, whatever is pressed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(f"\n{sentence()}", flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(128 + sent)
