"""Verdict of a validation, and the journal that verdicts are appended to so that a validation can resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.errors import ConfigError
from skyfleet.storage.local import write_atomically
from skyfleet.tasks.manifest import row_sha256
from skyfleet.tasks.task import Task


class Reason(StrEnum):
    ENV_FAILS = "env fails"
    UNGRADED = "ungraded"
    WRONG_CALL = "wrong call"
    IMPOSSIBLE = "impossible"
    FLAKY = "flaky"
    CHANGED_BY_GRADING = "changed by grading"
    VACUOUS = "vacuous"
    RANDOM_PASSES = "random passes"
    MUTANT_PASSES = "mutant passes"
    ANSWER_IN_PROMPT = "answer in prompt"
    DUPLICATE = "duplicate"
    OVERLAP = "overlap"
    TOO_HARD = "too hard"
    TOO_EASY = "too easy"
    UNVERIFIED = "unverified"

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        # The word that earlier versions wrote to quarantine files and journals.
        return cls.UNVERIFIED if value == "no reference" else None

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]

    @property
    def may_pass_later(self) -> bool:
        """Whether a busy machine or a failed service can be the cause, and not the task."""
        return self in (Reason.ENV_FAILS, Reason.UNGRADED, Reason.FLAKY)


_MEANINGS = {
    Reason.ENV_FAILS: "its environment fails to open or step",
    Reason.UNGRADED: "its verifier returns no grade, or none for a failing attempt",
    Reason.WRONG_CALL: "a reference call fails unexpectedly, or succeeds where an error is expected",
    Reason.IMPOSSIBLE: "its own reference solution does not pass",
    Reason.FLAKY: "the same calls get different grades",
    Reason.CHANGED_BY_GRADING: "grading changes the state",
    Reason.VACUOUS: "doing nothing passes",
    Reason.RANDOM_PASSES: "random calls pass",
    Reason.MUTANT_PASSES: "the reference with one wrong argument passes",
    Reason.ANSWER_IN_PROMPT: "its prompt contains the answer",
    Reason.DUPLICATE: "it duplicates another task of its source",
    Reason.OVERLAP: "it duplicates a task of another source",
    Reason.TOO_HARD: "the teacher solves it too rarely",
    Reason.TOO_EASY: "the teacher solves it too often",
    Reason.UNVERIFIED: "no reference solution or teacher shows that it can be solved; it is kept",
}


class Verdict(BaseModel):
    """The verdict on one version of a row; an edited row needs a new one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task_key: str
    env_key: str
    row_sha256: str
    reason: Reason | None = None
    evidence: str = ""

    @property
    def ok(self) -> bool:
        """Whether the row may be trained on: no fault was found."""
        return self.reason in (None, Reason.UNVERIFIED)

    @classmethod
    def on(cls, task: Task, fault: Fault | None) -> Verdict:
        return cls(
            task_key=task.key,
            env_key=task.env_key,
            row_sha256=row_sha256(task),
            reason=fault[0] if fault else None,
            evidence=fault[1] if fault else "",
        )


Fault = tuple[Reason, str]
"""Reason and evidence."""


class Journal:
    """Verdicts by row; an edited row has another hash and is validated again."""

    def __init__(self, file: TextIO, known: Mapping[tuple[str, str], Verdict]) -> None:
        self._file, self._known = file, known

    def find(self, task: Task) -> Verdict | None:
        """Return the verdict; None if there is none, or it may have been a time-out or an outage."""
        verdict = self._known.get((task.key, row_sha256(task)))
        if verdict is None or (verdict.reason is not None and verdict.reason.may_pass_later):
            return None
        return verdict

    def add(self, verdict: Verdict) -> None:
        self._file.write(verdict.model_dump_json() + "\n")
        self._file.flush()


@contextmanager
def open_journal(
    path: Path, checks: Mapping[str, Any], *, resume: bool = False, restart: bool = False
) -> Iterator[Journal]:
    """Open the journal. `checks` describes the checks: verdicts of other checks are not reused.

    Existing verdicts of the same checks need an explicit choice: `resume` or `restart`.
    """
    heading = json.dumps(dict(checks), sort_keys=True)
    verdicts = [] if restart or not path.exists() else _read(path, heading, resume=resume)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The last verdict counts: a row is validated again if its verdict may have changed.
    known = {(one.task_key, one.row_sha256): one for one in verdicts}
    lines = [heading, *(verdict.model_dump_json() for verdict in known.values())]
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    with path.open("a", encoding="utf-8") as file:
        yield Journal(file, known)


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
