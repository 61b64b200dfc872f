"""Quarantine: the rows that failed validation and must not be trained on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.curation.verdict import Reason, Verdict
from skyfleet.errors import TaskError
from skyfleet.storage.store import beside, is_remote, read_bytes, write_bytes
from skyfleet.tasks.manifest import row_sha256, sha256_of
from skyfleet.tasks.task import Task

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
            if verdict.reason is not None:
                rows[verdict.task_key, verdict.row_sha256] = Quarantined(
                    key=verdict.task_key,
                    row_sha256=verdict.row_sha256,
                    reason=verdict.reason,
                    evidence=verdict.evidence,
                )
        return Quarantine(rows)


def is_file(source: str) -> bool:
    """`world:` and `agentdojo:` sources are generated, not read."""
    return not source.startswith(("world:", "agentdojo:"))


def quarantine_for(sources: Iterable[str], named: str | None) -> Quarantine:
    """Read the named file, or else every `quarantine.jsonl` beside a source or in the working folder."""
    if named is not None:
        return read_quarantine(named)
    rows: dict[tuple[str, str], Quarantined] = {}
    files: dict[str, str] = {}
    nearby = [*(beside(source, QUARANTINE) for source in sources if is_file(source)), QUARANTINE]
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
        rows[row.key, row.row_sha256] = row
    return Quarantine(rows, {str(address): sha256_of(data)})


def write_quarantine(address: Path | str, quarantine: Quarantine) -> None:
    lines = [row.model_dump_json() + "\n" for _, row in sorted(quarantine.rows.items())]
    write_bytes(address, "".join(lines).encode())
