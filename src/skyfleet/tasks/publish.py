"""Publish a prepared dataset: parquet tables in SkyRL's format with Fleet's columns, and a manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyfleet.errors import ConfigError
from skyfleet.storage.local import atomic_folder
from skyfleet.storage.store import delete_bytes, is_remote, write_bytes
from skyfleet.tasks.manifest import MANIFEST, Manifest
from skyfleet.tasks.prepare import PreparedDataset
from skyfleet.tasks.task import Task

TRAIN, VALIDATION = "train.parquet", "validation.parquet"

_PUBLISHED_FILES = {TRAIN, VALIDATION, MANIFEST}
_TEXT_COLUMNS = (
    "env_class",
    "task_key",
    "data_source",
    "data_key",
    "data_version",
    "env_version",
    "env_variables",
    "env_variable_keys",
    "task_modality",
    "verifier_code",
    "solution",
    "metadata",
)


def dataset_files(prepared: PreparedDataset) -> dict[str, bytes]:
    """The files by name; without tasks to evaluate there is no validation file."""
    sides = {TRAIN: prepared.train, VALIDATION: prepared.validation}
    return {name: fleet_table(tasks) for name, tasks in sides.items() if tasks}


def fleet_table(tasks: Sequence[Task]) -> bytes:
    """Write parquet that SkyRL's dataset reads and that `load_tasks` reads as the same tasks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = {"role": None, "content": None} | dict.fromkeys(
        name for task in tasks for message in task.messages for name in sorted(message)
    )
    message = pa.struct([(name, pa.string()) for name in names])
    schema = pa.schema(
        [
            ("prompt", pa.list_(message)),
            *((name, pa.string()) for name in _TEXT_COLUMNS),
            ("difficulty", pa.int64()),
        ]
    )
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([_fleet_row(task) for task in tasks], schema=schema), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def publish(folder: str, files: Mapping[str, bytes], manifest: Manifest) -> None:
    """Write the files; a folder is replaced atomically, in a bucket the manifest is written last."""
    whole = {**files, MANIFEST: manifest.to_bytes()}
    if is_remote(folder):
        if VALIDATION not in files:  # of an earlier dataset there
            delete_bytes(f"{folder.rstrip('/')}/{VALIDATION}")
        for name, data in whole.items():
            write_bytes(f"{folder.rstrip('/')}/{name}", data)
        return
    check_replaceable(Path(folder))
    with atomic_folder(Path(folder)) as draft:
        for name, data in whole.items():
            (draft / name).write_bytes(data)


def check_replaceable(folder: Path) -> None:
    """The folder is replaced as a whole, so it may contain no other file."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir={str(folder)!r} is a file; set it to a folder")
    others = (
        sorted({path.name for path in folder.glob("*")} - _PUBLISHED_FILES)
        if folder.exists()
        else []
    )
    if others:
        raise ConfigError(
            f"output_dir={str(folder)!r} contains {others[0]!r}, which would be lost; "
            "set it to an empty or new folder"
        )


def _fleet_row(task: Task) -> dict[str, Any]:
    row = task.model_dump()
    return {
        "prompt": task.chat,
        # SkyRL needs a class in every row; `load_tasks` reads Fleet's as None.
        "env_class": task.env_class or "fleet_task",
        "task_key": task.key,
        "data_source": task.env_key,
        "data_key": task.data_key,
        "data_version": task.data_version,
        "env_version": task.env_version,
        "env_variables": json.dumps(row["env_variables"], ensure_ascii=False),
        "env_variable_keys": json.dumps(sorted(task.env_variables), ensure_ascii=False),
        "task_modality": task.modality,
        "verifier_code": task.verifier_code,
        "solution": json.dumps(row["solution"], ensure_ascii=False),
        "metadata": json.dumps(row["metadata"], ensure_ascii=False),
        "difficulty": task.difficulty,
    }
