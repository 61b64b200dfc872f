"""`skyfleet tasks validate` and `stats`: check tasks and summarise them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skyfleet.analysis.formatting import table
from skyfleet.cli.arguments import DryRun
from skyfleet.errors import ConfigError
from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.curation.teacher import Teacher
    from skyfleet.curation.verdict import Verdict
    from skyfleet.tasks.task import Task

_SEEN_CHARACTERS = 120

Sources = Annotated[
    list[str], typer.Argument(help="Task files, or world:github?split=train&count=20.")
]


def validate_command(
    sources: Sources,
    quarantine: Annotated[
        str, typer.Option(help="File for the tasks that fail.")
    ] = "quarantine.jsonl",
    settings: Annotated[
        list[str] | None,
        typer.Option("--override", help="A key=value, such as environment.env_class=openenv."),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="URL of a model that attempts the tasks.")
    ] = None,
    teacher_model: Annotated[str | None, typer.Option(help="The model's name there.")] = None,
    teacher_api: Annotated[
        Literal["openai", "anthropic"], typer.Option(help="Key in OPENAI_ or ANTHROPIC_API_KEY.")
    ] = "openai",
    attempts: Annotated[int, typer.Option(min=1, help="Attempts of the teacher per task.")] = 4,
    band: Annotated[
        tuple[float, float], typer.Option(help="Lowest and highest pass rate of the teacher.")
    ] = (0.25, 1.0),
    workers: Annotated[int, typer.Option(min=1, help="Tasks at once.")] = 16,
    timeout_seconds: Annotated[float, typer.Option(min=1, help="For each episode.")] = 120,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the journal.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the journal.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Check that each task is solvable and that its verifier rejects wrong solutions."""
    from skyfleet.config.loading import load_config
    from skyfleet.envs.event_loop import run_loop
    from skyfleet.envs.verifiers.confinement import check_verifiers
    from skyfleet.trainer.tasks import load_sources

    if (teacher is None) != (teacher_model is None):
        raise ConfigError("--teacher and --teacher-model belong together; pass both or neither")
    if resume and restart:
        raise ConfigError("--resume and --restart exclude each other; pass one of them")
    if not 0 <= band[0] <= band[1] <= 1:
        raise ConfigError(
            f"--band {band[0]} {band[1]}: pass two rates from 0 to 1, the lower first"
        )
    tasks = {source: load_sources([source], key="SOURCE") for source in sources}
    check_verifiers(load_config("", settings or []), chain(*tasks.values()))
    if dry_run:
        print(f"would check {sum(map(len, tasks.values()))} tasks of {', '.join(sources)}")
        return
    options: dict[str, Any] = {"settings": settings or []}
    if teacher is not None:
        options |= {"teacher": teacher, "model": teacher_model, "api": teacher_api}
        options |= {"attempts": attempts, "band": list(band)}
    checking = _validate(
        tasks,
        options,
        quarantine=quarantine,
        workers=workers,
        timeout_seconds=timeout_seconds,
        resume=resume,
        restart=restart,
    )
    _print_verdicts(run_loop(checking))
    print(f"quarantine: {quarantine}")


def stats_command(
    sources: Sources,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML section here.")] = None,
) -> None:
    """Per environment: tasks, share with env_variables, difficulties, calls, prompt length, tools."""
    from skyfleet.curation.quarantine import find_data_version
    from skyfleet.curation.stats import (
        HEADER,
        compute_stats,
        describe_variables,
        format_stats,
        render_stats_html,
    )
    from skyfleet.trainer.tasks import load_sources

    tasks = load_sources(sources, key="SOURCE")
    stats = compute_stats(tasks)
    print(table(HEADER, format_stats(stats)))
    print(describe_variables(stats))
    for source in sources:
        if version := find_data_version(source):
            print(f"dataset version of {source}: {version}")
    if html is not None:
        html.write_text(render_stats_html(", ".join(sources), stats), encoding="utf-8")


async def _validate(
    sources: Mapping[str, Sequence[Task]],
    options: Mapping[str, Any],
    *,
    quarantine: str,
    workers: int,
    timeout_seconds: float,
    resume: bool,
    restart: bool,
) -> list[Verdict]:
    from skyfleet.config.loading import load_config
    from skyfleet.curation.inspection import build_inspectable_factory
    from skyfleet.curation.quarantine import Quarantine, read_quarantine, write_quarantine
    from skyfleet.curation.validate import validate
    from skyfleet.curation.verdict import open_journal
    from skyfleet.storage.store import is_remote
    from skyfleet.storage.working_directory import anchor_path
    from skyfleet.tracking.console import ConsoleTracker

    try:
        known = read_quarantine(quarantine)
    except FileNotFoundError:
        known = Quarantine()
    # Absolute, because an environment may change the working directory.
    local = anchor_path(Path(quarantine).name if is_remote(quarantine) else quarantine)
    quarantine = quarantine if is_remote(quarantine) else str(local)
    path = Path(f"{local}.journal")
    console = ConsoleTracker()
    open_env = build_inspectable_factory(load_config("", options["settings"]))
    verdicts: list[Verdict] = []
    async with _teacher(options) as teacher:
        with (
            open_journal(path, options, resume=resume, restart=restart) as journal,
            console.progress("validate", sum(map(len, sources.values()))) as advance,
        ):

            def finish(verdict: Verdict) -> None:
                verdicts.append(verdict)
                advance()

            try:
                verdicts = await validate(
                    sources,
                    open_env,
                    journal=journal,
                    teacher=teacher,
                    workers=workers,
                    timeout_seconds=timeout_seconds,
                    on_finished=finish,
                )
            finally:
                # Verdicts from before an interruption are valid too.
                write_quarantine(quarantine, known.updated(verdicts))
    console.close()
    return verdicts


@asynccontextmanager
async def _teacher(options: Mapping[str, Any]) -> AsyncIterator[Teacher | None]:
    from skyfleet.curation.teacher import PassRateBand, Teacher
    from skyfleet.engines.anthropic_chat import AnthropicChat
    from skyfleet.engines.openai_chat import OpenAIChat

    if "teacher" not in options:
        yield None
        return
    chat = AnthropicChat if options["api"] == "anthropic" else OpenAIChat
    api_key = os.environ.get(f"{options['api'].upper()}_API_KEY")
    async with chat(options["teacher"], model=options["model"], api_key=api_key) as model:
        low, high = options["band"]
        yield Teacher(
            name=options["model"],
            model=model,
            attempts=options["attempts"],
            band=PassRateBand(low=low, high=high),
        )


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    from skyfleet.curation.verdict import Reason

    failed = [verdict for verdict in verdicts if verdict.reason is not None]
    rows = [("ok", str(len(verdicts) - len(failed)), "", "")]
    for reason in Reason:
        caught = [verdict for verdict in failed if verdict.reason is reason]
        if caught:
            seen = f"{caught[0].task_key}: {' '.join(caught[0].evidence.split())}"
            rows.append((reason.value, str(len(caught)), reason.meaning, seen[:_SEEN_CHARACTERS]))
    print(table(("verdict", "tasks", "meaning", "such as"), rows))
