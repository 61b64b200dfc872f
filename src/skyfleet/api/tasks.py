"""Tasks from what a user has: dicts, `Task`s, a data frame, a dataset, a path or a source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from skyfleet.errors import TaskError
from skyfleet.tasks.loading import load_tasks
from skyfleet.tasks.splits import SplitRule, split_tasks
from skyfleet.tasks.task import Task

DEFAULT_ENV_KEY = "env"
"""The env_key of a row that names no environment."""

TaskSource = object
"""A list of dicts or Tasks, a data frame, a dataset, a path, or `world:github?split=train&count=9`."""


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


def split(tasks: object, eval_ratio: float = 0.1) -> tuple[list[Task], list[Task]]:
    """Split tasks into training and evaluation tasks, by the same hash as `skyfleet tasks prepare`.

    The split depends on the tasks' keys, not on their order.

    >>> import skyfleet as sf
    >>> tasks = [{"prompt": f"Press the button {n} times.", "times": n} for n in range(1, 101)]
    >>> train, held_out = sf.split(tasks, eval_ratio=0.1)
    >>> len(train) + len(held_out)
    100
    """
    sides = split_tasks(as_tasks(tasks), SplitRule(eval_fraction=eval_ratio))
    if not sides.eval:
        raise TaskError(
            f"sf.split(eval_ratio={eval_ratio}): so few tasks leave fewer than 5 to evaluate; "
            "raise eval_ratio or pass eval= yourself"
        )
    return list(sides.train), list(sides.eval)


# Everything below is what tasks/from_objects.py does too; after the merge, import it from there.


def as_tasks(source: object) -> list[Task]:
    """Convert rows to tasks. A dict needs only a `prompt`; its other fields are the environment's."""
    if isinstance(source, str | Path):
        return load_tasks(source)
    tasks = [
        as_task(row, f"tasks row {number}") for number, row in enumerate(_list_rows(source), 1)
    ]
    if not tasks:
        raise TaskError("tasks is empty; pass at least one task")
    return tasks


def as_task(row: object, where: str = "task") -> Task:
    if isinstance(row, Task):
        return row
    if not isinstance(row, Mapping):
        raise TaskError(f'{where}: {row!r:.80} is not a dict; write {{"prompt": ...}}')
    given = {str(name): _plain(value, where) for name, value in row.items() if value is not None}
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:12]
    fields: dict[str, Any] = {"key": f"task-{digest}", "env_key": DEFAULT_ENV_KEY}
    fields |= {name: value for name, value in given.items() if name in Task.model_fields}
    others = {name: value for name, value in given.items() if name not in Task.model_fields}
    if isinstance(solution := fields.get("solution"), str):
        others["solution"] = solution
        del fields["solution"]
    fields["metadata"] = {**dict(fields.get("metadata") or {}), **others}
    try:
        return Task.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise TaskError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _list_rows(source: Any) -> list[Any]:
    if isinstance(source, Mapping | Task):
        raise TaskError("tasks is one task; pass a list of them")
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return list(source.to_dict(orient="records"))
    if hasattr(source, "to_pylist"):
        return list(source.to_pylist())
    if isinstance(source, Iterable):
        return list(source)
    raise TaskError(
        f"tasks={source!r:.80}; pass a list of dicts, a data frame, a dataset or a path"
    )


def _plain(value: Any, where: str) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TaskError(f"{where}: {error}; fields of a task are JSON values") from None
