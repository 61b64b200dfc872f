"""Trajectory: the record of one episode, and Group: all attempts at one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Finish, Transcript
from skyfleet.redaction import redact
from skyfleet.tasks.task import Grade


class Ending(StrEnum):
    DONE = "done"
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    LENGTH = "length"
    """The last turn was cut by `max_generate_length`. The environment received it all the same,
    so the episode may have been solved by it."""
    TIMEOUT = "timeout"
    FAILED = "failed"

    @property
    def truncated(self) -> bool:
        return self in (Ending.MAX_TURNS, Ending.CONTEXT_FULL, Ending.LENGTH, Ending.TIMEOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception as a value that can be counted and stored."""

    kind: str
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(kind=type(error).__name__, detail=redact(str(error)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    action: Message
    replies: tuple[Message, ...]
    reward: float
    """The step reward. It breaks the episode's reward down by turn."""
    engine_seconds: float
    env_seconds: float = 0.0
    info: Mapping[str, float] = field(default_factory=dict)
    """The numbers that the environment returned in `Step.info`."""
    finish_reason: Finish | None = None
    """Why sampling stopped; None in records of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    task_key: str
    env_key: str
    sample: int
    """The index of the attempt in its group."""
    prompt: tuple[Message, ...]
    """The messages the episode started with."""
    turns: tuple[Turn, ...]
    transcripts: tuple[Transcript, ...]
    """Usually one; more if history was rewritten; none for a ChatModel."""
    ending: Ending
    grade: Grade | None
    """None: unknown. The attempt is in no mean, no loss and no pass@k; it is counted separately."""
    failure: Failure | None = None
    seconds: float = 0.0
    """Wall time from reset to grade."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything in order: the prompt, then each action and the replies to it."""
        exchanged = (message for turn in self.turns for message in (turn.action, *turn.replies))
        return (*self.prompt, *exchanged)

    @property
    def reward(self) -> float | None:
        """None: unknown. Never read an unknown grade as zero."""
        return self.grade.reward if self.grade else None

    @property
    def success(self) -> bool | None:
        return self.grade.success if self.grade else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one task with the same sampling parameters."""

    task_key: str
    env_key: str
    trajectories: tuple[Trajectory, ...] = field(default=())

    @property
    def graded(self) -> tuple[Trajectory, ...]:
        """The attempts with a known grade."""
        return tuple(t for t in self.trajectories if t.grade is not None)

    @property
    def n_passed(self) -> int:
        return sum(t.grade.success for t in self.trajectories if t.grade is not None)

    @property
    def n_failed(self) -> int:
        """Graded and not passed; ungraded attempts count in neither number."""
        return len(self.graded) - self.n_passed

    @property
    def rewards(self) -> list[float]:
        """One per graded attempt."""
        return [t.grade.reward for t in self.trajectories if t.grade is not None]


def describe_ungraded(groups: Sequence[Group]) -> str | None:
    """Return a sentence if grades are missing."""
    attempts = [attempt for group in groups for attempt in group.trajectories]
    n_unknown = sum(attempt.grade is None for attempt in attempts)
    if not n_unknown:
        return None
    return f"{n_unknown} of {len(attempts)} attempts have no grade; the first: {first_grading_error(groups)}"


def first_grading_error(groups: Sequence[Group]) -> str:
    """Return the error of the first attempt that failed and has no grade."""
    return find_failure(groups) or "the environment gave no grade"


def find_failure(groups: Sequence[Group]) -> str | None:
    """The first failure of an attempt without a grade; None if none of them failed."""
    attempts = (attempt for group in groups for attempt in group.trajectories)
    failures = (attempt.failure for attempt in attempts if attempt.grade is None)
    first = next(filter(None, failures), None)
    return f"{first.kind}: {first.detail}"[:300] if first else None
