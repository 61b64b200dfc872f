"""Verdict: whether a task may be trained on, why not, and what was seen."""

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
    Reason.NO_REFERENCE: "it has no reference solution and no teacher was asked",
    Reason.ENV_FAILS: "its env cannot be opened or stepped",
    Reason.UNGRADED: "its verifier gives no grade, or none to an attempt that fails",
    Reason.WRONG_CALL: "a reference call fails that should not, or succeeds that should fail",
    Reason.IMPOSSIBLE: "its own reference solution does not pass",
    Reason.FLAKY: "the same calls get another grade",
    Reason.CHANGED_BY_GRADING: "grading it changes the state",
    Reason.VACUOUS: "doing nothing passes",
    Reason.RANDOM_PASSES: "random calls pass",
    Reason.MUTANT_PASSES: "the reference with one wrong argument passes",
    Reason.ANSWER_IN_PROMPT: "its prompt gives the answer away",
    Reason.DUPLICATE: "another task of its source asks the same",
    Reason.OVERLAP: "a task of another source asks the same",
    Reason.TOO_HARD: "the teacher solves it too seldom",
    Reason.TOO_EASY: "the teacher solves it too often",
}


class Verdict(BaseModel):
    """On one row as it stood: an edited row needs another."""

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
"""What is wrong, and what was seen."""
