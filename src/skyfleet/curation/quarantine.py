"""Quarantine of rows that failed validation, and the check that a run trains on none of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.curation.verdict import Reason, Verdict
from skyfleet.errors import ConfigError, TaskError
from skyfleet.storage.store import is_remote, read_bytes, sibling_address, write_bytes
from skyfleet.tasks.manifest import MANIFEST, Manifest, read_manifest, row_sha256, sha256_hex
from skyfleet.tasks.sources import is_file
from skyfleet.tasks.task import Task

logger = logging.getLogger(__name__)

QUARANTINE = "quarantine.jsonl"


class Quarantined(BaseModel):
    """One line of the file. It applies to one version of a row: a corrected row is free."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    row_sha256: str
    reason: Reason
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Quarantine:
    rows: dict[tuple[str, str], Quarantined] = field(default_factory=dict)
    """By key and row hash."""
    files: dict[str, str] = field(default_factory=dict, compare=False)
    """The sha256 of each file it was read from."""

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task) and self.reason_for(task) is not None

    def reason_for(self, task: Task) -> Reason | None:
        row = self.rows.get((task.key, row_sha256(task)))
        return row.reason if row else None

    def updated(self, verdicts: Iterable[Verdict]) -> Quarantine:
        """Return a copy: rows that pass now are removed, rows that fail now are added.

        If a row has several verdicts, one failure suffices, in any order.
        """
        new = list(verdicts)
        validated = {(verdict.task_key, verdict.row_sha256) for verdict in new}
        rows = {row_id: row for row_id, row in self.rows.items() if row_id not in validated}
        for verdict in new:
            if verdict.reason is not None and not verdict.ok:
                rows[verdict.task_key, verdict.row_sha256] = Quarantined(
                    key=verdict.task_key,
                    row_sha256=verdict.row_sha256,
                    reason=verdict.reason,
                    evidence=verdict.evidence,
                )
        return Quarantine(rows)


def find_quarantine(sources: Iterable[str], named: str | None) -> Quarantine:
    """Read the named file, or else every `quarantine.jsonl` beside a source or in the working folder."""
    if named is not None:
        return read_quarantine(named)
    rows: dict[tuple[str, str], Quarantined] = {}
    files: dict[str, str] = {}
    nearby = [
        *(sibling_address(source, QUARANTINE) for source in sources if is_file(source)),
        QUARANTINE,
    ]
    once = {one if is_remote(one) else os.path.realpath(one): one for one in nearby}
    for address in once.values():
        try:
            found = read_quarantine(address)
        except FileNotFoundError:
            continue
        rows |= found.rows
        files |= found.files
    return Quarantine(rows, files)


def read_quarantine(address: Path | str) -> Quarantine:
    """Read a quarantine file; FileNotFoundError if there is none."""
    rows = {}
    data = read_bytes(address)
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{address}: {error}; give a file that `skyfleet tasks validate` wrote"
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = Quarantined.model_validate_json(line)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            field_name = ".".join(map(str, problem["loc"])) or "the line"
            raise TaskError(
                f"{address} row {number}: {field_name}: {problem['msg']}; "
                "write it again with `skyfleet tasks validate`"
            ) from None
        if row.reason is not Reason.UNVERIFIED:  # an earlier version wrote these rows too
            rows[row.key, row.row_sha256] = row
    return Quarantine(rows, {str(address): sha256_hex(data)})


def write_quarantine(address: Path | str, quarantine: Quarantine) -> None:
    lines = [row.model_dump_json() + "\n" for _, row in sorted(quarantine.rows.items())]
    write_bytes(address, "".join(lines).encode())


def check_training_data(
    tasks: Collection[Task],
    sources: Sequence[str],
    *,
    allow_unmanifested: bool,
    quarantine: Quarantine | None,
) -> None:
    """Raise ConfigError for a file without a manifest, a validation task or a quarantined task.

    A source that is not a file needs no manifest: its address determines its tasks. Rows that their
    own environment grades, as in SkyRL's datasets, have no verifier to validate: without a manifest
    they only bring a warning.
    """
    optional = bool(tasks) and all(map(_is_graded_by_environment, tasks))
    for source in filter(is_file, sources):
        if optional and not _has_manifest(source):
            if not allow_unmanifested:
                logger.warning(
                    "data.train_data=%r has no %s beside it: only data.val_data is checked for "
                    "tasks in common",
                    source,
                    MANIFEST,
                )
            continue
        manifest = _find_manifest(source) if allow_unmanifested else _require_manifest(source)
        if manifest is not None:
            _check_sides(tasks, source, manifest)
    quarantined = [task for task in tasks if task in quarantine] if quarantine else []
    if quarantine and quarantined:
        where = f" ({', '.join(quarantine.files)})" if quarantine.files else ""
        raise ConfigError(
            f"data.train_data contains {len(quarantined)} tasks in quarantine{where}, such as "
            f"{quarantined[0].key!r} ({quarantine.reason_for(quarantined[0])}); drop them with "
            "`skyfleet tasks prepare --quarantine`, or set data.allow_quarantined=true"
        )


def _is_graded_by_environment(task: Task) -> bool:
    """Whether the row names an environment of SkyRL's kind, and brings no verifier or reference."""
    return task.env_class not in (None, "world", "fleet_task", "openenv_fleet") and not (
        task.verifier_code or task.solution
    )


def _has_manifest(source: str) -> bool:
    try:
        read_bytes(sibling_address(source, MANIFEST))
    except FileNotFoundError:
        return False
    return True


def _check_sides(tasks: Collection[Task], source: str, manifest: Manifest) -> None:
    """Compare by key, whichever file a task is from: no validation task may be trained on."""
    sides = {key: entry.side for key, entry in manifest.tasks.items()}
    held_out = [task.key for task in tasks if sides.get(task.key, "train") != "train"]
    if held_out:
        raise ConfigError(
            f"data.train_data contains {len(held_out)} tasks, such as {held_out[0]!r}, that the "
            f"{MANIFEST} beside {source!r} lists on the {sides[held_out[0]]} side; set the file of "
            "its train side, or split again with `skyfleet tasks prepare`"
        )


def _find_manifest(source: str) -> Manifest | None:
    """Return the manifest that lists the file; allow_unmanifested applies only to unlisted files."""
    try:
        manifest = read_manifest(sibling_address(source, MANIFEST))
    except (FileNotFoundError, TaskError):
        return None
    return manifest if _file_name(source) in manifest.files else None


def find_data_version(source: str) -> str | None:
    """The version in the manifest that lists the file; None for worlds and unlisted files."""
    manifest = _find_manifest(source) if is_file(source) else None
    return manifest.data_version if manifest is not None else None


def _require_manifest(source: str) -> Manifest:
    remedy = (
        f"write one with `skyfleet tasks prepare --tasks-json {source}` and train on what it "
        "writes, or set data.allow_unmanifested=true"
    )
    try:
        manifest = read_manifest(sibling_address(source, MANIFEST))
    except FileNotFoundError:
        raise ConfigError(
            f"data.train_data={source!r} has no {MANIFEST} beside it; {remedy}"
        ) from None
    name = _file_name(source)
    if name not in manifest.files:
        raise ConfigError(
            f"data.train_data={source!r} is not in the {MANIFEST} beside it, which lists "
            f"{sorted(manifest.files)}; {remedy}"
        )
    if sha256_hex(read_bytes(source)) != manifest.files[name]:
        raise ConfigError(
            f"data.train_data={source!r} has changed since its {MANIFEST} was written; {remedy}"
        )
    return manifest


def _file_name(source: str) -> str:
    return source.rpartition("/")[2]
