"""Raw rows: what `tasks prepare` reads, and where the dataset of each modality goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skyfleet.errors import TaskError
from skyfleet.tasks.loading import parse_tasks, read_source
from skyfleet.tasks.task import Modality, Task

PLACE = "{modality}"
"""Stands for the modality in a source and in a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRows:
    modality: Modality | None
    source: str
    folder: str
    env_filter: tuple[str, ...]
    data: bytes
    rows: list[tuple[int, Task]]


def read_raw_rows(
    modality: Modality | None, source: str, folder: str, env_filter: tuple[str, ...]
) -> RawRows:
    data = read_source(source)
    return RawRows(
        modality=modality,
        source=source,
        folder=folder,
        env_filter=env_filter,
        data=data,
        rows=parse_tasks(data, source),
    )


def read_both_modalities(source: str, folder: str, env_filter: tuple[str, ...]) -> list[RawRows]:
    """The rows of tool_use and of computer_use, each with those of the environments that it has.

    A modality that has none of them gets an empty filter; TaskError if neither has one of them.
    """
    if PLACE not in folder:
        raise TaskError(
            f"--modality both writes two datasets; write --output-dir {folder.rstrip('/')}/{PLACE}"
        )
    both: tuple[Modality, ...] = ("tool_use", "computer_use")
    parts = [
        read_raw_rows(one, source.replace(PLACE, one), folder.replace(PLACE, one), env_filter)
        for one in both
    ]
    if not env_filter:
        return parts
    known = [{task.env_key for _, task in p.rows if task.modality == p.modality} for p in parts]
    there = set().union(*known)
    if unknown := sorted(set(env_filter) - there):
        raise TaskError(
            f"env_filter names {unknown[0]!r}, which has no task in either modality; choose from "
            f"{sorted(there)}"
        )
    return [
        replace(part, env_filter=tuple(name for name in env_filter if name in own))
        for part, own in zip(parts, known, strict=True)
    ]
