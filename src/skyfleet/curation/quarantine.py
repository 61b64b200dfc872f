"""Quarantine: the rows that failed a check, so that nobody trains on them by accident."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.curation.verdict import Reason, Verdict
from skyfleet.errors import TaskError
from skyfleet.storage.store import read_bytes, write_bytes
from skyfleet.tasks.manifest import row_sha256
from skyfleet.tasks.task import Task


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

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task) and self.reason_for(task) is not None

    def reason_for(self, task: Task) -> Reason | None:
        row = self.rows.get((task.key, row_sha256(task)))
        return row.reason if row else None

    def updated(self, verdicts: Iterable[Verdict]) -> Quarantine:
        """Rows that now pass leave, rows that now fail come, others stay."""
        rows = dict(self.rows)
        for verdict in verdicts:
            place = verdict.task_key, verdict.row_sha256
            rows.pop(place, None)
            if verdict.reason is not None:
                rows[place] = Quarantined(
                    key=verdict.task_key,
                    row_sha256=verdict.row_sha256,
                    reason=verdict.reason,
                    evidence=verdict.evidence,
                )
        return Quarantine(rows)


def read_quarantine(address: Path | str) -> Quarantine:
    """FileNotFoundError where there is none."""
    rows = {}
    for number, line in enumerate(read_bytes(address).decode().split("\n"), start=1):
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
    return Quarantine(rows)


def write_quarantine(address: Path | str, quarantine: Quarantine) -> None:
    lines = [row.model_dump_json() + "\n" for _, row in sorted(quarantine.rows.items())]
    write_bytes(address, "".join(lines).encode())
