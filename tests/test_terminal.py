"""Escape sequences in names, model output and errors do not reach the terminal."""

from __future__ import annotations

import ast
import errno
import io
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import skyfleet.cli
from skyfleet.analysis.formatting import table
from skyfleet.chat.message import Message, ToolCall
from skyfleet.cli.main import app, main
from skyfleet.cli.rollout import _show
from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.table import score_table
from skyfleet.redaction import remember_secrets
from skyfleet.tasks.loading import write_tasks
from skyfleet.tasks.task import Task
from skyfleet.terminal import RedactingFilter, add_note, sanitize, sanitize_lines
from skyfleet.terminal import print as print_safely
from skyfleet.tracking.console import ConsoleTracker, format_example
from skyfleet.trajectories.trajectory import Group
from tests.trajectories.making import attempt

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "link": "\x1b]8;;https://evil.example\x1b\\safe\x1b]8;;\x1b\\",
    "clear": "\x1b[2J\x1b[H",
    "colour": "\x1b[8mhidden\x1b[0m",
    "C1": "\x9b2J\x90q\x9c",
    "return": "good\rbad",
    "backspace": "bad\b\b\bgood",
    "bell and NUL": "\x07\x00\x7f",
    "bidi": "\u202egnp.exe\u2066\u2069\u200f",
    "separators": "a\u2028b\u2029c\x85d\x0be\x0cf",
    "surrogate": "\ud800",
}
EVERYTHING = "".join(HOSTILE.values())


def assert_safe(text: str) -> None:
    assert [c for c in text if not c.isprintable() and c not in "\n\t"] == []


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_every_control_character_is_escaped(text: str) -> None:
    assert_safe(sanitize(text))
    assert_safe(sanitize_lines(f"a\n\t{text}"))
    assert sanitize_lines(f"a\n\t{text}").startswith("a\n\t")


def test_text_of_people_is_unchanged() -> None:
    text = "Grüße, 世界\u3000→ l\u00a0an 🙂"
    assert sanitize(text) == sanitize_lines(text) == text


def test_commands_print_names_without_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    visible = EVERYTHING.replace("\ud800", "")
    task = Task(key=f"k{visible}", env_key=f"e{visible}", prompt=f"p{visible}")
    write_tasks(tmp_path / "tasks.jsonl", [task])
    source = str(tmp_path / "tasks.jsonl")
    app(["tasks", "list", source], standalone_mode=False)
    app(["tasks", "show", source, task.key], standalone_mode=False)
    app(["tasks", "stats", source], standalone_mode=False)
    print_safely(EVERYTHING, f"{EVERYTHING}\n")
    output = capsys.readouterr().out
    assert "owned" in output
    assert_safe(output)


def test_commands_print_no_known_secret(capsys: pytest.CaptureFixture[str]) -> None:
    remember_secrets(["a-password-of-the-run"])
    print_safely("evaluated at http://bot:a-password-of-the-run@host", "FLEET_API_KEY=generated")
    output = capsys.readouterr().out
    assert "a-password-of-the-run" not in output
    assert "FLEET_API_KEY=generated" in output


def test_model_output_and_tool_names_of_a_rollout_are_escaped() -> None:
    stream = io.StringIO()
    call = ToolCall(id="c", name=EVERYTHING, arguments={EVERYTHING: EVERYTHING})
    message = Message(
        role="assistant",
        content=EVERYTHING,
        tool_calls=(call,),
        malformed_calls=(EVERYTHING,),
    )
    _show(Console(file=stream, highlight=False, color_system=None, width=200), [message])
    assert "owned" in stream.getvalue()
    assert_safe(stream.getvalue())


def test_the_console_escapes_notes_phases_and_examples() -> None:
    stream = io.StringIO()
    console = ConsoleTracker(stream=stream)
    trajectory = attempt(1.0, task_key=EVERYTHING, env_key=EVERYTHING)
    group = Group(task_key=EVERYTHING, env_key=EVERYTHING, trajectories=(trajectory,))
    console.note(EVERYTHING)
    console.note(format_example(1, [group]))
    with console.progress(EVERYTHING, 1) as advance:
        advance()
    name = f"reward/avg_pass_at_{EVERYTHING}"
    console.log({name: 0.5, f"generate/ending_{EVERYTHING}": 1.0, "loss/num_samples": 0.0}, 1)
    assert "owned" in stream.getvalue()
    assert_safe(stream.getvalue())


def test_a_long_message_of_an_example_is_cut() -> None:
    trajectory = attempt(1.0)
    page = Message(role="user", content="x" * 1_000_000)
    group = Group(task_key="t", env_key="e", trajectories=(replace(trajectory, prompt=(page,)),))
    example = format_example(1, [group])
    assert len(example) < 21_000
    assert "xxx... (980007 more characters)" in example


def test_tables_escape_names() -> None:
    trajectory = attempt(1.0, task_key=EVERYTHING, env_key=EVERYTHING)
    group = Group(task_key=EVERYTHING, env_key=EVERYTHING, trajectories=(trajectory,))
    assert_safe(table((EVERYTHING,), [(EVERYTHING,)]))
    assert_safe(score_table([EvalReport.from_groups("val", [group], step=0)]))


def test_errors_and_log_records_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ConfigError(EVERYTHING)

    monkeypatch.setattr("skyfleet.cli.main.app", fail)
    with pytest.raises(SystemExit):
        main()
    assert_safe(capsys.readouterr().err)
    try:
        raise OSError(EVERYTHING)
    except OSError as error:
        kind = (type(error), error, error.__traceback__)
    record = logging.LogRecord("skyfleet.x", 30, "f", 1, "%s", (EVERYTHING,), kind)
    assert RedactingFilter().filter(record)
    assert_safe(logging.Formatter().format(record))


class _Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("message", "arguments", "expected"),
    [
        ("%d items", ("many",), "%d items ('many',)"),
        ("100% done of %s and %s", (f"x {EVERYTHING}",), "100% done of"),
        ("%s", (_Unprintable(),), "a log record of lib cannot be formatted: RuntimeError"),
        (_Unprintable(), (), "a log record of lib cannot be formatted: RuntimeError"),
    ],
)
def test_a_malformed_log_call_does_not_raise_into_its_caller(
    message: object, arguments: tuple[object, ...], expected: str
) -> None:
    record = logging.LogRecord("lib", 30, "f", 1, message, arguments, None)
    assert RedactingFilter().filter(record)
    assert record.getMessage().startswith(expected)
    assert_safe(record.getMessage())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, "Cannot allocate memory", "libtorch.so"),
    ],
)
def test_a_process_without_memory_ends_with_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("skyfleet.cli.main.app", fail)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skyfleet: out of memory (")


def test_an_uncaught_exception_is_redacted_and_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        error = RuntimeError(f"{EVERYTHING} https://me:hunter2hunter2@host/")
        error.add_note(f"task {EVERYTHING}")
        raise error

    monkeypatch.setattr("skyfleet.cli.main.app", fail)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 1
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    output = capsys.readouterr().err
    assert output.count("RuntimeError: ") == 2
    assert "owned" in output
    assert "hunter2" not in output
    assert_safe(output)


def test_a_note_on_an_exception_is_redacted_and_escaped() -> None:
    error = ValueError("x")
    add_note(error, f"task {EVERYTHING} at https://me:hunter2hunter2@host/")
    (note,) = error.__notes__
    assert_safe(note)
    assert "hunter2" not in note
    assert "\n" not in note


def test_every_command_prints_through_the_terminal_module() -> None:
    folder = Path(next(iter(skyfleet.cli.__path__)))
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text())
        prints = any(isinstance(n, ast.Name) and n.id == "print" for n in ast.walk(tree))
        imported = any(
            isinstance(n, ast.ImportFrom)
            and n.module == "skyfleet.terminal"
            and "print" in {alias.name for alias in n.names}
            for n in ast.walk(tree)
        )
        assert not prints or imported, f"{path.name}: from skyfleet.terminal import print"
