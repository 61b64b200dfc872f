"""EvaluatedSet: the episodes of an evaluation set at its first and its last step, read once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.failure_shift import Ended
from skyfleet.analysis.failures import classify
from skyfleet.analysis.reading import read_entries
from skyfleet.errors import SkyfleetError
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory

Episode = tuple[Entry, Trajectory, FailureClass | None]
"""With why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A set at one step."""

    step: int
    episodes: tuple[Episode, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for _, trajectory, _ in self.episodes]

    @property
    def ended(self) -> list[Ended]:
        return [((entry.env_key, entry.task_key), failure) for entry, _, failure in self.episodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSet:
    name: str
    ends: tuple[Evaluated, ...]
    """First and last; one where it was evaluated once, none where neither can be read."""
    excuses: tuple[str, ...]
    """A sentence for each file that cannot be read whole and is left out."""

    @property
    def pair(self) -> tuple[Evaluated, Evaluated] | None:
        """Before and after."""
        return (self.ends[0], self.ends[1]) if len(self.ends) == 2 else None


def evaluated_sets(entries: Sequence[Entry]) -> list[EvaluatedSet]:
    files: dict[str, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        files[entry.set_name][entry.step].append(entry)
    return [
        _read_set(name, [by_step[step] for step in sorted({min(by_step), max(by_step)})])
        for name, by_step in files.items()
    ]


def _read_set(name: str, files: Sequence[Sequence[Entry]]) -> EvaluatedSet:
    ends, excuses = [], []
    for entries in files:
        step = entries[0].step
        try:
            episodes = tuple((e, t, classify(t)) for e, t in read_entries(entries))
        except (SkyfleetError, OSError) as error:
            excuses.append(f"{name} at step {step} is left out: {error}.")
        else:
            ends.append(Evaluated(step=step, episodes=episodes))
    return EvaluatedSet(name=name, ends=tuple(ends), excuses=tuple(excuses))
