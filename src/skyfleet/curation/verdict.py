"""Verdict of a validation: whether a task may be trained on, else the reason and the evidence."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from skyfleet.tasks.manifest import row_sha256
from skyfleet.tasks.task import Task


class Reason(StrEnum):
    NO_REFERENCE = "no reference"
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

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    Reason.NO_REFERENCE: "it has no reference solution, and no teacher model was given",
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
        return self.reason is None

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
