"""What ends a command is one sentence, also if several episodes met it at once."""

from __future__ import annotations

import errno

import pytest

from skyfleet.cli import main as command_line
from skyfleet.errors import ConfigError, EngineLostError

BROKEN = OSError(errno.EIO, "Input/output error", "runs/one/metrics.jsonl")
SENTENCE = "skyfleet: runs/one/metrics.jsonl: Input/output error\n"


def run_and_raise(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(command_line, "app", app)
    command_line.main()


@pytest.mark.parametrize(
    ("error", "printed", "code"),
    [
        (
            ConfigError("trainer.seed='x'; write a number"),
            "skyfleet: trainer.seed='x'; write a number\n",
            2,
        ),
        (
            EngineLostError("vLLM died", "run the same command"),
            "skyfleet: vLLM died; run the same command\n",
            75,
        ),
        (BROKEN, SENTENCE, 75),
        (ExceptionGroup("episodes", [BROKEN, BROKEN]), SENTENCE, 75),
        (ExceptionGroup("steps", [ExceptionGroup("episodes", [BROKEN])]), SENTENCE, 75),
    ],
)
def test_an_error_that_names_its_subject_is_one_sentence_and_its_notes(
    error: Exception,
    printed: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error.add_note("training step 2 failed: the same command goes on")
    try:
        with pytest.raises(SystemExit) as end:
            run_and_raise(error, monkeypatch)
    finally:
        del error.__notes__
    assert end.value.code == code
    printed += "training step 2 failed: the same command goes on\n"
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        ExceptionGroup("episodes", [BROKEN, ZeroDivisionError()]),
    ],
)
def test_an_error_that_says_nothing_about_its_subject_keeps_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_and_raise(error, monkeypatch)
    assert end.value.code == 1
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert type(error).__name__ in printed
