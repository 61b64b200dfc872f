"""Tasks from Python objects: dicts, `Task`s, data frames, datasets or a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, TypeAdapter, ValidationError

from skyfleet.errors import TaskError
from skyfleet.tasks.loading import check_unique_keys, load_tasks
from skyfleet.tasks.rows import FIELD_COLUMNS, parse_rows, shorten, to_json_values
from skyfleet.tasks.splits import SplitRule, split_tasks
from skyfleet.tasks.task import Task

DEFAULT_ENV_KEY = "env"


def as_tasks(source: object) -> list[Task]:
    """Convert a source of rows to tasks.

    A source is a list of dicts or `Task`s, a pandas DataFrame, a pyarrow Table, a Hugging Face
    dataset or any other iterable of dicts, or the path of a task file. A dict needs only a
    `prompt`; its key is derived from its content, and every column that is not a field of `Task`
    goes into `metadata`, where `task[name]` finds it:

        >>> (task,) = as_tasks([{"prompt": "Press the button twice.", "times": 2}])
        >>> task.env_key, task["times"]
        ('env', 2)
    """
    if isinstance(source, str | Path):
        return load_tasks(source, default_env_key=DEFAULT_ENV_KEY)
    given = _list_rows(source)
    prepare = _drop_missing if _is_table(source) else _keep_own_columns
    rows = {number: row for number, row in given if not isinstance(row, Task)}
    parsed = dict(
        parse_rows(
            (
                (number, prepare(to_json_values(_null_missing(row), where)), where)
                for number, row in rows.items()
                for where in [f"tasks row {number}"]
            ),
            default_env_key=DEFAULT_ENV_KEY,
        )
    )
    numbered = [(n, row if isinstance(row, Task) else parsed[n]) for n, row in given]
    check_unique_keys(numbered, "tasks")
    return [task for _, task in numbered]


def as_task(source: Task | Mapping[str, Any]) -> Task:
    """Convert one dict to a task; a `Task` is returned as it is."""
    return as_tasks([source])[0]


def split(source: object, eval_ratio: float = 0.1) -> tuple[list[Task], list[Task]]:
    """Split tasks into train and evaluation tasks, by the same hash of the key as `tasks prepare`.

    The split does not depend on the order of the tasks.

    >>> import skyfleet as sf
    >>> tasks = [{"prompt": f"Press the button {n} times.", "times": n} for n in range(1, 101)]
    >>> train, held_out = sf.split(tasks, eval_ratio=0.1)
    >>> len(train) + len(held_out)
    100
    """
    tasks = as_tasks(source)
    rule = SplitRule(eval_fraction=eval_ratio)
    sides = split_tasks(tasks, rule)
    if not sides.train:
        raise TaskError(f"eval_ratio={eval_ratio} leaves no task to train on; lower it")
    if not sides.eval:
        least = ceil(100 * rule.min_eval_tasks / len(tasks)) / 100
        raise TaskError(
            f"eval_ratio={eval_ratio} of {len(tasks)} tasks leaves none to evaluate: an env needs "
            f"at least {rule.min_eval_tasks}; raise it to {least} or more, or add tasks"
        )
    return list(sides.train), list(sides.eval)


def _list_rows(source: Any) -> list[tuple[int, Any]]:
    if isinstance(source, Task):
        raise TaskError("tasks is one Task; pass a list of tasks")
    if isinstance(source, Mapping):
        raise TaskError(
            f"tasks is a dict with the keys {shorten(list(source))}; pass a list of dicts, or one "
            'split of a dataset, such as dataset["train"]'
        )
    if _is_frame(source):
        rows = source.to_dict(orient="records")
    elif hasattr(source, "to_pylist"):
        rows = source.to_pylist()
    elif isinstance(source, Iterable):
        rows = list(source)
    else:
        raise TaskError(
            f"tasks={shorten(source)}; pass a list of dicts, a data frame, a dataset or a path"
        )
    if not rows:
        raise TaskError("tasks is empty; pass at least one task")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Task | Mapping):
            raise TaskError(
                f"tasks row {number}: {shorten(row)} is not a dict; "
                'write {"prompt": ...} with any other fields'
            )
    return list(enumerate(rows, start=1))


def _is_table(source: object) -> bool:
    return _is_frame(source) or hasattr(source, "to_pylist")


def _is_frame(source: Any) -> bool:
    return hasattr(source, "to_dict") and hasattr(source, "columns")


def _null_missing(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """Data frames mark a missing value as NaN, NaT or NA."""
    return {name: None if _is_missing(value) else value for name, value in row.items()}


def _is_missing(value: object) -> bool:
    is_nan = isinstance(value, float) and value != value
    return is_nan or type(value).__name__ in ("NAType", "NaTType")


def _drop_missing(row: dict[str, Any]) -> dict[str, Any]:
    """A table has every column in every row: null means that this row has no value."""
    return {name: value for name, value in row.items() if value is not None}


def _keep_own_columns(row: dict[str, Any]) -> dict[str, Any]:
    """Put into `metadata` what a dict holds for its environment and `parse_rows` drops or rejects.

    These are None in a column that is not a field of `Task`, and a value that is not one of the
    field whose name it has, such as difficulty="hard". A number as key becomes its text.
    """
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        return row
    own = {
        name: value
        for name, value in row.items()
        if name not in metadata and (_is_null_column(name, value) or _clashes(name, value))
    }
    kept = {name: value for name, value in row.items() if name not in own}
    for name in ("key", "task_key"):
        if isinstance(key := kept.get(name), int | float):
            kept[name] = str(key)
    return kept | {"metadata": {**own, **metadata}} if own else kept


def _is_null_column(name: str, value: object) -> bool:
    return value is None and name not in FIELD_COLUMNS


def _clashes(name: str, value: object) -> bool:
    if value is None or name not in _CLASHING:
        return False
    try:
        _CLASHING[name].validate_python(value)
    except ValidationError:
        return True
    return False


def _build_validators() -> dict[str, TypeAdapter[Any]]:
    validators: dict[str, TypeAdapter[Any]] = {}
    for name in _CLASHING_FIELDS:
        field = Task.model_fields[name]
        alias = field.validation_alias
        names = alias.choices if isinstance(alias, AliasChoices) else [name]
        limits = tuple(field.metadata)
        kind: Any = Annotated[(field.annotation, *limits)] if limits else field.annotation
        validators |= dict.fromkeys(map(str, names), TypeAdapter(kind))
    return validators


_CLASHING_FIELDS = (
    *("env_version", "modality", "env_variables", "data_key", "data_version"),
    *("difficulty", "env_class"),
)
"""Optional fields whose names an environment may use for columns of its own."""

_CLASHING = _build_validators()
"""By the names that a row may give the field."""
