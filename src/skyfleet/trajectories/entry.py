"""Entry: the summary of an episode that the index holds, without its record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skyfleet.trajectories.trajectory import Ending, Trajectory

Kind = Literal["train", "eval"]

COLUMNS = (
    "env_key",
    "task_key",
    "sample",
    "ending",
    "reward",
    "success",
    "turns",
    "tool_calls",
    "tool_errors",
    "malformed_calls",
    "sampled_tokens",
    "seconds",
    "failure",
    "offset",
    "line",
)
"""The columns of an index line, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    path: Path
    """The file that holds the episode."""
    number: int
    """Its position in the file, from 0."""
    kind: Kind
    set_name: str
    """Empty for training."""
    step: int
    env_key: str
    task_key: str
    sample: int
    ending: Ending
    reward: float | None
    """None, like success, if unknown."""
    success: bool | None
    turns: int
    tool_calls: int
    tool_errors: int
    malformed_calls: int
    sampled_tokens: int
    seconds: float
    failure: str | None
    """The class of the error that ended it, such as VerifierError."""
    offset: int
    """The byte offset of its gzip member."""
    line: int
    """Its line in the member, from 0."""

    @property
    def id(self) -> str:
        """`eval/unseen_tasks/40/3`: the fourth episode of that set at step 40."""
        place = ("train",) if self.kind == "train" else ("eval", self.set_name)
        return "/".join((*place, str(self.step), str(self.number)))


def index_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".jsonl.gz") + ".index.jsonl")


def tool_errors(trajectory: Trajectory) -> int:
    """Count tool messages that are errors; other messages of the environment do not count."""
    replies = (reply for turn in trajectory.turns for reply in turn.replies)
    return sum(reply.role == "tool" and reply.is_error for reply in replies)


def sampled_tokens(trajectory: Trajectory) -> int:
    """Count the tokens that the policy sampled, over all transcripts."""
    return sum(sum(transcript.loss_mask) for transcript in trajectory.transcripts)


def index_values(trajectory: Trajectory) -> list[Any]:
    """Return the columns that depend on the episode alone."""
    actions = [turn.action for turn in trajectory.turns]
    return [
        trajectory.env_key,
        trajectory.task_key,
        trajectory.sample,
        trajectory.ending.value,
        trajectory.reward,
        trajectory.success,
        len(actions),
        sum(len(action.tool_calls) for action in actions),
        tool_errors(trajectory),
        sum(len(action.malformed_calls) for action in actions),
        sampled_tokens(trajectory),
        round(trajectory.seconds, 4),
        trajectory.failure and trajectory.failure.kind,
    ]
