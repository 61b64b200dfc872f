"""Trajectories that print and render, one or many."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from typing import TYPE_CHECKING, Any

from skyfleet.api.tables import Table
from skyfleet.chat.message import Message
from skyfleet.streams import open_stdout
from skyfleet.terminal import sanitize_lines
from skyfleet.trainer.callbacks import StepResult
from skyfleet.trajectories import trajectory as records

if TYPE_CHECKING:
    from skyfleet.trajectories.entry import Entry


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trajectory(records.Trajectory):
    """One episode: its messages, tokens, ending and grade. `show()` prints it.

    >>> import skyfleet as sf
    >>> env = sf.ToolEnv(reward=lambda answer: float("4" in answer))
    >>> trajectory = sf.rollout("null", env, {"prompt": "What is 2 + 2?", "key": "sum"})
    >>> trajectory
    Trajectory('sum', done, 1 turn, reward 0)
    >>> trajectory.show()
    [user] What is 2 + 2?
    [assistant] <done>
    sum: done, 1 turn, reward 0
    """

    @classmethod
    def from_record(cls, record: records.Trajectory) -> Trajectory:
        return cls(**{field.name: getattr(record, field.name) for field in fields(record)})

    def show(self) -> None:
        """Print the episode."""
        open_stdout().write(f"{sanitize_lines(str(self))}\n")

    def __str__(self) -> str:
        return "\n".join(
            (*map(format_message, self.messages), f"{self.task_key}: {self._outcome()}")
        )

    def __repr__(self) -> str:
        return f"Trajectory({self.task_key!r}, {self._outcome()})"

    def _repr_html_(self) -> str:
        blocks = (
            f"<div><b>{message.role}</b><pre style='white-space:pre-wrap;margin:0 0 .6em'>"
            f"{escape(_format_content(message))}</pre></div>"
            for message in self.messages
        )
        return (
            f"<details open><summary>{escape(f'{self.task_key}: {self._outcome()}')}</summary>"
            f"{''.join(blocks)}</details>"
        )

    def _outcome(self) -> str:
        n = len(self.turns)
        reward = "unknown" if self.reward is None else f"{self.reward:g}"
        failed = f", {self.failure.kind}: {self.failure.detail}" if self.failure else ""
        turns = f"{n} turn{'' if n == 1 else 's'}"
        return f"{self.ending}, {turns}, reward {reward}{failed}"


def format_message(message: Message) -> str:
    return f"[{message.role}] {_format_content(message)}"


def _format_content(message: Message) -> str:
    calls = (
        f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
        for call in message.tool_calls
    )
    broken = (f"malformed call: {text}" for text in message.malformed_calls)
    return "\n".join(filter(None, (message.text, *calls, *broken)))


def wrap_step(step: StepResult) -> StepResult:
    """The same step with trajectories that print and render."""
    groups = [
        replace(group, trajectories=tuple(map(Trajectory.from_record, group.trajectories)))
        for group in step.groups
    ]
    return replace(step, groups=groups)


class Trajectories(Sequence[Trajectory]):
    """Stored episodes, read as they are needed; `to_pandas()` is one row per episode.

    >>> import skyfleet as sf
    >>> tasks = [{"prompt": "What is 2 + 2?", "key": "sum"}]
    >>> evaluation = sf.evaluate("null", reward=lambda answer: 0.0, tasks=tasks, output="scores")
    >>> episodes = sf.load_run("scores").trajectories(passed=False)
    >>> episodes, episodes[0].task_key
    (Trajectories(1 episodes, 0 passed), 'sum')
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = tuple(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Trajectory]:
        from skyfleet.analysis.run_folder import read_entries

        for _, trajectory in read_entries(self._entries):
            yield Trajectory.from_record(trajectory)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Trajectories(self._entries[index])
        return next(iter(Trajectories((self._entries[index],))))

    def to_table(self) -> Table:
        """One row per episode, without its messages."""
        columns: dict[str, Callable[[Entry], Any]] = {
            "id": lambda e: e.id,
            "kind": lambda e: e.kind,
            "set": lambda e: e.set_name,
            "step": lambda e: e.step,
            "env": lambda e: e.env_key,
            "task": lambda e: e.task_key,
            "sample": lambda e: e.sample,
            "ending": lambda e: str(e.ending),
            "reward": lambda e: e.reward,
            "success": lambda e: e.success,
            "turns": lambda e: e.turns,
            "tool_calls": lambda e: e.tool_calls,
            "sampled_tokens": lambda e: e.sampled_tokens,
            "seconds": lambda e: e.seconds,
            "failure": lambda e: e.failure,
        }
        rows = [{name: read(e) for name, read in columns.items()} for e in self._entries]
        return Table.from_rows(rows, columns=list(columns))

    def to_arrow(self) -> Any:
        return self.to_table().to_arrow()

    def to_pandas(self) -> Any:
        return self.to_table().to_pandas()

    def __repr__(self) -> str:
        passed = sum(entry.success is True for entry in self._entries)
        return f"Trajectories({len(self)} episodes, {passed} passed)"

    def _repr_html_(self) -> str:
        return self.to_table()._repr_html_()
