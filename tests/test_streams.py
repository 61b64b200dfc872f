"""What an environment does to sys.stdout and sys.stderr does not end the run that prints next."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from skyfleet import streams
from skyfleet.streams import open_stdout, remember_streams
from skyfleet.terminal import RedactingFilter
from skyfleet.terminal import print as print_safely
from skyfleet.tracking.console import ConsoleTracker


@contextmanager
def writing_to_a_pipe() -> Iterator[Callable[[], str]]:
    """Both streams write to one pipe; closing them closes their descriptors."""
    reading, writing = os.pipe()
    # In the test's body, because pytest sets both streams between a fixture and its test.
    with (
        open(writing, "w", buffering=1) as stdout,
        open(os.dup(writing), "w", buffering=1) as stderr,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(streams, "_remembered", {})
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        yield lambda: os.read(reading, 4096).decode()
    os.close(reading)


def close() -> None:
    sys.stdout.close()
    sys.stderr.close()


def remove() -> None:
    sys.stdout = sys.stderr = None


@pytest.mark.parametrize("harm", [close, remove])
def test_lines_are_printed_after_an_environment_closed_or_removed_the_streams(
    harm: Callable[[], None],
) -> None:
    handler = logging._StderrHandler(logging.WARNING)  # type: ignore[attr-defined]
    handler.addFilter(RedactingFilter())
    with writing_to_a_pipe() as read_output:
        console = ConsoleTracker(total_steps=2)
        harm()
        console.note("a note")
        assert read_output() == "a note\n"
        harm()
        print_safely("a table")
        assert read_output() == "a table\n"
        harm()
        handler.handle(logging.makeLogRecord({"msg": "a warning", "levelno": logging.WARNING}))
        assert read_output() == "a warning\n"
        harm()
        with console.progress("evaluate", 1) as advance:
            advance()
        console.close()
        assert read_output() == "evaluate 1/1\n"


def test_a_stream_that_replaces_another_is_used() -> None:
    with writing_to_a_pipe():
        remember_streams()
        own, sys.stdout = sys.stdout, sys.stderr
        assert open_stdout() is sys.stderr
        sys.stdout = own
        assert open_stdout() is own


def test_a_process_without_streams_prints_nothing() -> None:
    with writing_to_a_pipe() as read_output:
        writer = sys.stderr
        remove()
        ConsoleTracker().note("nobody reads this")
        writer.write("the only text")
        writer.flush()
        assert read_output() == "the only text"
