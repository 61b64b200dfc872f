"""Text of models, environments and data files on a terminal: control characters are escaped.

A terminal executes escape sequences: they set its title, write its clipboard, hide a line or draw a
link whose target is not its text. Bidirectional controls reorder what a reader sees.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from functools import cache
from typing import TextIO

from skyfleet.redaction import redact, redact_known
from skyfleet.streams import restore_streams

_LINE_BREAKS = "\n\t"
_SPACES = "\u00a0\u2009\u202f\u3000"
"""Not printable by Python's rule, but harmless: no-break, thin and ideographic spaces."""


def sanitize(text: str, *, at_most: int | None = None) -> str:
    """Escape control characters and line breaks, which a terminal would interpret."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else _escape(c) for c in text)
    return text[:at_most]


def sanitize_lines(text: str) -> str:
    """Escape control characters, but keep line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(c if c in _LINE_BREAKS or c.isprintable() else _escape(c) for c in text)


def print(
    *values: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
) -> None:
    """Python's `print` for commands: escapes control characters and redacts known secrets."""
    restore_streams()
    stream = sys.stdout if file is None else file
    stream.write(sep.join(sanitize_lines(redact_known(str(value))) for value in values) + end)
    if flush:
        stream.flush()


class RedactingFilter(logging.Filter):
    """Redacts log records and escapes their control characters; add it to a logging handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        restore_streams()  # the handler writes to standard error next
        record.msg, record.args = sanitize_lines(redact(_format_message(record))), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = sanitize_lines(redact(record.exc_text))
        if record.stack_info:
            record.stack_info = sanitize_lines(redact(record.stack_info))
        return True


def _format_message(record: logging.LogRecord) -> str:
    """The message; a filter must not raise into the code that logs, however wrong its call is."""
    try:
        return record.getMessage()
    except Exception:
        pass
    try:
        return f"{record.msg} {record.args!r}"
    except Exception as error:
        return f"a log record of {record.name} cannot be formatted: {type(error).__name__}"


def add_note(error: BaseException, text: str) -> None:
    """Add a note, redacted and escaped, to an exception that Python or a notebook may print."""
    error.add_note(sanitize(redact(text)))


def print_traceback(error: BaseException) -> None:
    """Print Python's traceback to stderr, redacted and escaped."""
    restore_streams()
    sys.stderr.write(sanitize_lines(redact("".join(traceback.format_exception(error)))))


def install_thread_hook() -> None:
    """Print what ends a thread through `print_traceback`; for commands, whose process is ours."""

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
            print_traceback(arguments.exc_value)

    threading.excepthook = hook


@cache
def install_log_filter() -> None:
    """Filter what Python prints of log records if nobody has configured logging."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(RedactingFilter())


def _escape(character: str) -> str:
    return character if character in _SPACES else repr(character)[1:-1]
