"""Sources: what a `data` key names, as tasks."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.errors import ConfigError
from skyfleet.tasks.loading import load_tasks
from skyfleet.tasks.task import Task, TaskSet
from skyfleet.worlds.catalog import tasks_from_source


def load_sources(sources: Sequence[str], *, key: str) -> list[Task]:
    """All tasks of all sources, in order."""
    tasks = [task for source in sources for task in _load(source)]
    if not tasks:
        raise ConfigError(
            f"{key} is empty: name task files or worlds, such as world:github?split=train&count=400"
        )
    return list(TaskSet(tasks))


def _load(source: str) -> list[Task]:
    """A file, `world:github?split=train&count=400`, or `agentdojo:slack` (`agentdojo:` is all)."""
    if source.startswith("world:"):
        return tasks_from_source(source)
    if source.startswith("agentdojo:"):
        from skyfleet.envs.agentdojo.tasks import agentdojo_tasks

        return agentdojo_tasks(source.removeprefix("agentdojo:") or None)
    return load_tasks(source)
