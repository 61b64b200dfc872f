"""Text of models, environments and data files on a terminal: control characters are escaped.

A terminal executes escape sequences: they set its title, write its clipboard, hide a line or draw a
link whose target is not its text. Bidirectional controls reorder what a reader sees.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import TextIO

from skyfleet.redaction import redact, redact_known

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
    stream = sys.stdout if file is None else file
    stream.write(sep.join(sanitize_lines(redact_known(str(value))) for value in values) + end)
    if flush:
        stream.flush()


class RedactingFilter(logging.Filter):
    """Redacts log records and escapes their control characters; add it to a logging handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = sanitize_lines(redact(record.getMessage())), None
        if record.exc_info and not record.exc_text:
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = sanitize_lines(redact(text))
        return True


@cache
def install_log_filter() -> None:
    """Filter what Python prints of log records if nobody has configured logging."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(RedactingFilter())


def _escape(character: str) -> str:
    return character if character in _SPACES else repr(character)[1:-1]
