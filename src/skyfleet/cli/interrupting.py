"""Interrupts: Ctrl-C, pressed once or twice, ends a command with one sentence and its exit code."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from skyfleet.terminal import print

T = TypeVar("T")


async def cancel_on_ctrl_c(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`. The first Ctrl-C cancels it; a second raises KeyboardInterrupt in the running task.

    It is turned into a cancellation here, because asyncio would print its traceback otherwise.
    """
    task = asyncio.current_task()
    assert task is not None
    try:
        return await work
    except BaseException as error:
        if task.cancelling() and _is_keyboard_interrupt(error):
            raise asyncio.CancelledError from None
        raise


def _is_keyboard_interrupt(error: BaseException | None) -> bool:
    """Also if another exception wraps it, as imports do."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return error is not None
    return _is_keyboard_interrupt(error.__cause__ or error.__context__)


def exit_interrupted(sentence: Callable[[], str], sent: signal.Signals = signal.SIGINT) -> NoReturn:
    """Print the sentence and exit; further signals are ignored while it prints."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(f"\n{sentence()}", flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(128 + sent)


def repeat_command() -> str:
    """This process's own command, for a shell."""
    program, *arguments = sys.argv
    is_module = Path(program).name == "__main__.py"  # python -m skyfleet
    return shlex.join(
        [*([sys.executable, "-m", "skyfleet"] if is_module else [program]), *arguments]
    )
