"""Manifest of a prepared dataset: source, options, split, and the hash of every file and task."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyfleet.errors import TaskError
from skyfleet.storage.store import read_bytes
from skyfleet.tasks.prepare import PreparedDataset, normalize_words
from skyfleet.tasks.splits import Side
from skyfleet.tasks.task import Task

MANIFEST = "manifest.json"

SplitBy = Literal["ratio", "earlier thresholds"]


class Entry(BaseModel):
    """One task of the dataset."""

    model_config = ConfigDict(frozen=True)

    side: Side
    sha256: str


class Manifest(BaseModel):
    """Deterministic: it holds no time and no host name, so equal inputs give equal bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    format_version: Literal[1] = 1
    skyfleet_version: str = Field(default_factory=lambda: version("skyfleet"))
    python_version: str = Field(default_factory=platform.python_version)
    data_version: str | None = None
    """The name of this version of the dataset, such as v0.2; None in manifests of older versions."""
    source: str
    source_sha256: str
    options: dict[str, Any]
    split_by: SplitBy
    """With `ratio`, an env's size decides its threshold; with `earlier thresholds`, no task moves."""
    thresholds: dict[str, float]
    counts: dict[str, dict[Side, int]]
    """Number of tasks by env and side."""
    unique_prompts: dict[Side, int]
    dropped: dict[str, int]
    """Number of dropped rows by reason."""
    moved: dict[str, Side]
    """Tasks that changed side since the earlier manifest, with their new side."""
    files: dict[str, str]
    """The sha256 of each file."""
    tasks: dict[str, Entry]

    def to_bytes(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()


def make_manifest(
    prepared: PreparedDataset,
    files: Mapping[str, bytes],
    *,
    source: str,
    source_sha256: str,
    options: Mapping[str, Any],
    split_by: SplitBy,
    earlier: Manifest | None,
    data_version: str | None = None,
) -> Manifest:
    """Without `data_version` the version is named after the source: see `name_version`."""
    sides: dict[Side, tuple[Task, ...]] = {
        "train": prepared.train,
        "validation": prepared.validation,
    }
    tasks = {
        task.key: Entry(side=side, sha256=row_sha256(task))
        for side, rows in sides.items()
        for task in rows
    }
    return Manifest(
        data_version=data_version or name_version(source, source_sha256),
        source=source,
        source_sha256=source_sha256,
        options=dict(options),
        split_by=split_by,
        thresholds=prepared.thresholds,
        counts=_count(sides),
        unique_prompts={
            side: len({normalize_words(task.prompt) for task in rows})
            for side, rows in sides.items()
        },
        dropped=dict(sorted(Counter(prepared.dropped.values()).items())),
        moved=_find_moved(tasks, earlier),
        files={name: sha256_hex(data) for name, data in files.items()},
        tasks=tasks,
    )


def name_version(source: str, source_sha256: str) -> str:
    """`v0.2` of `s3://bucket/v0.2/openenv/tasks.json`; otherwise the start of the source's hash."""
    folders = [part for part in source.split("/")[:-1] if re.fullmatch(r"v\d+(\.\d+)*", part)]
    return folders[-1] if folders else f"sha256-{source_sha256[:12]}"


def read_manifest(address: Path | str) -> Manifest:
    """Read a manifest; FileNotFoundError if there is none."""
    data = read_bytes(address)
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise TaskError(
            f"{address}: {field}: {first['msg']}; run `skyfleet tasks prepare` again"
        ) from None


def row_sha256(task: Task) -> str:
    """Hash every field of the task, independent of file format and column order."""
    row = json.dumps(task.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    return sha256_hex(row.encode("utf-8", "surrogatepass"))


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _count(sides: Mapping[Side, Iterable[Task]]) -> dict[str, dict[Side, int]]:
    by_side = {side: Counter(task.env_key for task in rows) for side, rows in sides.items()}
    envs = sorted(set().union(*by_side.values()))
    return {env: {side: counts[env] for side, counts in by_side.items()} for env in envs}


def _find_moved(tasks: Mapping[str, Entry], earlier: Manifest | None) -> dict[str, Side]:
    before = earlier.tasks if earlier else {}
    return {
        key: entry.side
        for key, entry in sorted(tasks.items())
        if key in before and before[key].side != entry.side
    }
