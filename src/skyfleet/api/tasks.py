"""Tasks of any source that `tasks=` takes, as objects."""

from __future__ import annotations

from pathlib import Path

from skyfleet.tasks.from_objects import DEFAULT_ENV_KEY as DEFAULT_ENV_KEY
from skyfleet.tasks.from_objects import as_task as as_task
from skyfleet.tasks.from_objects import as_tasks
from skyfleet.tasks.from_objects import split as split
from skyfleet.tasks.task import Task


def as_source(tasks: object) -> str | None:
    """The tasks as a configuration names them, if they are a path or a source."""
    return str(tasks) if isinstance(tasks, str | Path) else None


def load_given_tasks(tasks: object, *, env_key: str | None = None) -> list[Task]:
    """Tasks of any source; those that name no environment belong to `env_key`."""
    source = as_source(tasks)
    if source is not None and ":" in source.partition("?")[0] and not Path(source).exists():
        from skyfleet.trainer.tasks import load_sources

        return load_sources([source], key="tasks")
    loaded = as_tasks(tasks)
    if env_key is None:
        return loaded
    return [
        task.model_copy(update={"env_key": env_key}) if task.env_key == DEFAULT_ENV_KEY else task
        for task in loaded
    ]
