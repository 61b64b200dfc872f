"""Quarantine: the rows that failed a check, so that nobody trains on them by accident."""

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
    """One row of the file. It holds for the row as it stood: a mended one is free."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    row_sha256: str
    reason: Reason
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Quarantine:
    rows: dict[tuple[str, str], Quarantined] = field(default_factory=dict)
    """By key and hash."""
    files: dict[str, str] = field(default_factory=dict, compare=False)
    """The sha256 of each file it was read from."""

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task) and self.reason_for(task) is not None

    def reason_for(self, task: Task) -> Reason | None:
        row = self.rows.get((task.key, row_sha256(task)))
        return row.reason if row else None

    def updated(self, verdicts: Iterable[Verdict]) -> Quarantine:
        """Rows that now pass leave, rows that now fail come, others stay.

        Of a row with several verdicts one that fails is enough, in whatever order they come.
        """
        judged = list(verdicts)
        places = {(verdict.task_key, verdict.row_sha256) for verdict in judged}
        rows = {place: row for place, row in self.rows.items() if place not in places}
        for verdict in judged:
            if verdict.reason is not None:
                rows[verdict.task_key, verdict.row_sha256] = Quarantined(
                    key=verdict.task_key,
                    row_sha256=verdict.row_sha256,
                    reason=verdict.reason,
                    evidence=verdict.evidence,
                )
        return Quarantine(rows)


def is_file(source: str) -> bool:
    """`world:` and `agentdojo:` sources are made, not read."""
    return not source.startswith(("world:", "agentdojo:"))


def quarantine_for(sources: Iterable[str], named: str | None) -> Quarantine:
    """The named one; without a name, every `quarantine.jsonl` beside a source or right here."""
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
    """FileNotFoundError where there is none."""
    rows = {}
    data = read_bytes(address)
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{address}: {error}; name the file that `skyfleet tasks validate` wrote"
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
