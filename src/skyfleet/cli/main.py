"""The `skyfleet` command line. Commands import their implementation when they run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from skyfleet.cli.analyze import analyze_command
from skyfleet.cli.audit import audit_command
from skyfleet.cli.compare import compare_command
from skyfleet.cli.config import config_app
from skyfleet.cli.diff import diff_command
from skyfleet.cli.evaluate import evaluate_command
from skyfleet.cli.import_dumps import import_dumps_command
from skyfleet.cli.launch import launch_command
from skyfleet.cli.log import log_command
from skyfleet.cli.presets import presets_command
from skyfleet.cli.replay import replay_command
from skyfleet.cli.report import report_command
from skyfleet.cli.rollout import rollout_command
from skyfleet.cli.runs import runs_app
from skyfleet.cli.serve import serve_command
from skyfleet.cli.tasks import tasks_app
from skyfleet.cli.train import train_command
from skyfleet.cli.view import view_command
from skyfleet.cli.worlds import worlds_app
from skyfleet.errors import SkyfleetError
from skyfleet.redaction import redact
from skyfleet.terminal import print, sanitize

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


app.command("train")(train_command)
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
    try:
        app()
    except SkyfleetError as error:
        _fail([error])
    except OSError as error:
        if error.filename is None:
            raise
        _fail([OSError(f"{error.filename}: {error.strerror}")])
    except BaseExceptionGroup as group:
        ours, others = group.split(SkyfleetError)
        if ours is None or others is not None:
            raise
        _fail(_leaves(ours))


def _fail(errors: Sequence[BaseException]) -> None:
    for error in errors[:1]:
        # A message may quote model output or a downloaded file.
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        lines = map(sanitize, redact(text).splitlines())
        print("skyfleet: " + "\n".join(lines), file=sys.stderr)
    raise SystemExit(2)


def _leaves(group: BaseExceptionGroup[SkyfleetError]) -> list[BaseException]:
    """All exceptions of the group; concurrent episodes usually fail for one reason."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves


if __name__ == "__main__":
    main()
