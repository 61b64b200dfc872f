"""Journal of a validation: verdicts are appended as they are made, so that it can resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from skyfleet.curation.verdict import Verdict
from skyfleet.errors import ConfigError
from skyfleet.storage.local import write_atomically
from skyfleet.tasks.manifest import row_sha256
from skyfleet.tasks.task import Task


class Journal:
    """Verdicts by row; an edited row has another hash and is validated again."""

    def __init__(self, file: TextIO, known: Mapping[tuple[str, str], Verdict]) -> None:
        self._file, self._known = file, known

    def find(self, task: Task) -> Verdict | None:
        return self._known.get((task.key, row_sha256(task)))

    def add(self, verdict: Verdict) -> None:
        self._file.write(verdict.model_dump_json() + "\n")
        self._file.flush()


@contextmanager
def keeping_journal(
    path: Path, checks: Mapping[str, Any], *, resume: bool = False, restart: bool = False
) -> Iterator[Journal]:
    """Open the journal. `checks` describes the checks: verdicts of other checks are not reused.

    Existing verdicts of the same checks need an explicit choice: `resume` or `restart`.
    """
    heading = json.dumps(dict(checks), sort_keys=True)
    verdicts = [] if restart or not path.exists() else _read(path, heading, resume=resume)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [heading, *(verdict.model_dump_json() for verdict in verdicts)]
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    with path.open("a", encoding="utf-8") as file:
        yield Journal(file, {(one.task_key, one.row_sha256): one for one in verdicts})


def _read(path: Path, heading: str, *, resume: bool) -> list[Verdict]:
    first, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if first != heading:
        if not resume:
            return []
        raise ConfigError(
            f"{path} was written with the options {first[:200]}, now they are {heading[:200]}; "
            "use the same options, or start over with --restart"
        )
    verdicts = []
    for line in lines:
        try:
            verdicts.append(Verdict.model_validate_json(line))
        except ValidationError:
            continue  # The line that was being written when the last run was interrupted.
    if verdicts and not resume:
        raise ConfigError(
            f"{path} contains {len(verdicts)} verdicts of these checks; continue with --resume, "
            "which checks only new and edited rows, or start over with --restart"
        )
    return verdicts
