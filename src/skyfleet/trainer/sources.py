"""Sources: what a `data` key names, as tasks."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.envs.worlds.catalog import tasks_from_source
from skyfleet.errors import ConfigError
from skyfleet.tasks.loading import load_tasks
from skyfleet.tasks.task import Task
from skyfleet.tasks.task_set import TaskSet


def load_sources(sources: Sequence[str], *, key: str) -> list[Task]:
    """All tasks of all sources: files, or `world:github?split=train&count=400`."""
    tasks = [
        task
        for source in sources
        for task in (
            tasks_from_source(source) if source.startswith("world:") else load_tasks(source)
        )
    ]
    if not tasks:
        raise ConfigError(
            f"{key} is empty: name task files or worlds, such as world:github?split=train&count=400"
        )
    return list(TaskSet(tasks))
