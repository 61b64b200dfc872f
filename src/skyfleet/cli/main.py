"""The `skyfleet` command line. Commands import their implementation when they run."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from skyfleet.cli.analyze import analyze_command
from skyfleet.cli.audit import audit_command
from skyfleet.cli.compare import compare_command
from skyfleet.cli.config import config_app
from skyfleet.cli.diff import diff_command
from skyfleet.cli.evaluate import evaluate_command
from skyfleet.cli.exiting import exit_stuck
from skyfleet.cli.import_dumps import import_dumps_command
from skyfleet.cli.launch import launch_command
from skyfleet.cli.log import log_command
from skyfleet.cli.plan import plan_command
from skyfleet.cli.preflight import preflight_command
from skyfleet.cli.presets import presets_command
from skyfleet.cli.replay import replay_command
from skyfleet.cli.report import report_command
from skyfleet.cli.rollout import rollout_command
from skyfleet.cli.runs import runs_app
from skyfleet.cli.serve import serve_command
from skyfleet.cli.sweep import sweep_command
from skyfleet.cli.tasks import tasks_app
from skyfleet.cli.train import train_command
from skyfleet.cli.view import view_command
from skyfleet.cli.worlds import worlds_app
from skyfleet.errors import SkyfleetError, is_outage
from skyfleet.redaction import redact
from skyfleet.streams import remember_streams, restore_streams
from skyfleet.terminal import install_thread_hook, print, print_traceback, sanitize

app = typer.Typer(
    name="skyfleet",
    help="Train tool-using agents by reinforcement learning, with the evidence to believe it.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"skyfleet {installed('skyfleet')}")
        raise typer.Exit


app.command("plan")(plan_command)
app.command("preflight")(preflight_command)
app.command("train")(train_command)
app.command("sweep")(sweep_command)
app.command("evaluate")(evaluate_command)
app.command("compare")(compare_command)
app.command("report")(report_command)
app.command("view")(view_command)
app.command("analyze")(analyze_command)
app.command("diff")(diff_command)
app.command("audit")(audit_command)
app.command("log")(log_command)
app.command("rollout")(rollout_command)
app.command("replay")(replay_command)
app.command("serve")(serve_command)
app.command("launch")(launch_command)
app.command("presets")(presets_command)
app.command("import-dumps")(import_dumps_command)
app.add_typer(runs_app)
app.add_typer(tasks_app)
app.add_typer(worlds_app)
app.add_typer(config_app)


def main() -> None:
    """Run a command; a user's mistake prints one sentence and exits with code 2."""
    remember_streams()
    install_thread_hook()
    try:
        _run()
    except SystemExit as end:
        exit_stuck(end.code)
        raise


def _run() -> None:
    try:
        app()
    except (Exception, BaseExceptionGroup) as error:
        explained, others = _split(error)
        if explained is None or others is not None:
            # Its message may quote model output or a password too.
            print_traceback(error)
            raise SystemExit(1) from None
        # Concurrent episodes usually fail for one reason.
        leaf = _find_leaf(explained)
        _fail(leaf, *(() if leaf is error else getattr(error, "__notes__", ())))


def _split(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """The part of an error that its sentence explains, and the part that needs a traceback."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(_is_explained)
    return (error, None) if _is_explained(error) else (None, error)


def _is_explained(error: BaseException) -> bool:
    """Its text says what happened to what."""
    if isinstance(error, SkyfleetError) or _is_out_of_memory(error):
        return True
    return isinstance(error, OSError) and error.filename is not None


def _is_out_of_memory(error: BaseException) -> bool:
    """Also of the address space: then no thread can be started, or a library fails to map a file."""
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return True
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def _describe(error: BaseException) -> str:
    if _is_out_of_memory(error):
        return (
            f"out of memory ({str(error).strip() or 'MemoryError'}); raise the limit of the process, "
            "end others, or lower generator.max_num_seqs and trainer.max_tokens_per_microbatch"
        )
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _fail(error: BaseException, *notes: str) -> None:
    restore_streams()
    # A message may quote model output or a downloaded file.
    text = "\n".join([_describe(error), *getattr(error, "__notes__", ()), *notes])
    lines = map(sanitize, redact(text).splitlines())
    print("skyfleet: " + "\n".join(lines), file=sys.stderr)
    raise SystemExit(os.EX_TEMPFAIL if is_outage(error) else 2)


def _find_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    main()
