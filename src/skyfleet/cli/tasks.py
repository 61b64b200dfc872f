"""`skyfleet tasks`: list, show, export, validate and prepare tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from skyfleet.cli.tasks_data import stats_command, validate_command
from skyfleet.cli.tasks_prepare import prepare_command
from skyfleet.errors import TaskError
from skyfleet.terminal import print

tasks_app = typer.Typer(
    name="tasks", help="List, validate and prepare tasks.", no_args_is_help=True
)
tasks_app.command("prepare")(prepare_command)
tasks_app.command("validate")(validate_command)
tasks_app.command("stats")(stats_command)

Source = Annotated[str, typer.Argument(help="A task file, or world:github?split=train&count=20.")]


@tasks_app.command("list")
def list_command(source: Source) -> None:
    """One line per task: key, difficulty, prompt."""
    from skyfleet.trainer.tasks import load_sources

    tasks = load_sources([source], key="SOURCE")
    width = max(len(task.key) for task in tasks)
    for task in tasks:
        prompt = " ".join(task.prompt.split())
        print(
            f"{task.key:{width}}  {'-' if task.difficulty is None else task.difficulty}  {prompt}"
        )


@tasks_app.command("export")
def export_command(
    sources: Annotated[list[str], typer.Argument(help="Task files, or world:github?count=20.")],
    output: Annotated[str, typer.Option(help="A .json, .jsonl or .parquet file, or s3://….")],
) -> None:
    """Write tasks to a file, as raw rows."""
    from skyfleet.tasks.loading import write_tasks
    from skyfleet.trainer.tasks import load_sources

    tasks = load_sources(sources, key="SOURCE")
    write_tasks(output, tasks)
    print(f"wrote {len(tasks)} tasks to {output}")


@tasks_app.command("show")
def show_command(source: Source, key: str) -> None:
    """A whole task: prompt, reference solution, verifier."""
    from skyfleet.trainer.tasks import load_sources

    found = [task for task in load_sources([source], key="SOURCE") if task.key == key]
    if not found:
        raise TaskError(f"{source} has no task {key!r}; `skyfleet tasks list` shows its keys")
    (task,) = found
    print(f"{task.key}: {task.env_key}, {task.data_key}, difficulty {task.difficulty}\n")
    print(f"{task.prompt}\n")
    for call in task.solution:
        arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        print(f"  {call.name}({arguments})")
    print(f"\n{task.verifier_code or '(no verifier)'}")
