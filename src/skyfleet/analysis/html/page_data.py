"""ShownRun: a run folder read once, with the letter and colour it has on the page."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from skyfleet.analysis.before_after import BehaviourChange, Ended, behaviour_changes
from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.failures import classify
from skyfleet.analysis.learning_signal import EnvSignal, env_signals, quarters
from skyfleet.analysis.run_folder import RunFolder, read_entries
from skyfleet.errors import SkyfleetError, TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.evaluation.report import EvalReport
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    folder: RunFolder
    slot: int
    alone: bool
    """No other run is on the page, so it needs no letter."""
    metrics: tuple[Mapping[str, float], ...]
    timing: tuple[Mapping[str, float], ...]
    reports: Mapping[str, Mapping[int, EvalReport]]
    training: tuple[Entry, ...]
    evaluation: tuple[Entry, ...]
    excuses: tuple[str, ...]
    """A sentence for each file of episodes that cannot be listed."""

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def mark(self) -> str:
        """`A` for the first of several."""
        return "" if self.alone else _letters(self.slot)

    @property
    def title(self) -> str:
        return f"{self.mark} {self.name}".strip()

    @property
    def last_step(self) -> int:
        return int(max((row["step"] for row in self.metrics), default=0))

    def view_command(self, entry_id: str) -> str:
        """What opens the episode whole."""
        return shlex.join(("skyfleet", "view", str(self.folder.path), "--episode", entry_id))


def read_runs(folders: Sequence[RunFolder]) -> list[ShownRun]:
    return [
        _read(folder, slot=slot, alone=len(folders) == 1) for slot, folder in enumerate(folders)
    ]


def training_envs(runs: Iterable[ShownRun]) -> list[str]:
    return sorted({entry.env_key for run in runs for entry in run.training})


def first_and_last(run: ShownRun) -> tuple[list[Entry], list[Entry]]:
    """The training episodes of the first and of the last quarter of the steps."""
    first, last = (set(steps) for steps in quarters(entry.step for entry in run.training))
    return (
        [entry for entry in run.training if entry.step in first],
        [entry for entry in run.training if entry.step in last],
    )


def _read(folder: RunFolder, *, slot: int, alone: bool) -> ShownRun:
    excuses: list[str] = []
    entries = folder.entries(on_damage=lambda error: excuses.append(f"Left out: {error}."))
    return ShownRun(
        folder=folder,
        slot=slot,
        alone=alone,
        metrics=tuple(folder.metrics()),
        timing=tuple(folder.timing()),
        reports=folder.reports(),
        training=tuple(entry for entry in entries if entry.kind == "train"),
        evaluation=tuple(entry for entry in entries if entry.kind == "eval"),
        excuses=tuple(excuses),
    )


def _letters(slot: int) -> str:
    """A to Z, then A2 to Z2."""
    again, place = divmod(slot, len(ascii_uppercase))
    return ascii_uppercase[place] + (str(again + 1) if again else "")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    run: ShownRun
    signals: Mapping[str, EnvSignal]
    """By environment."""
    sets: Sequence[EvaluatedSet]
    changes: Mapping[str, Sequence[BehaviourChange]]
    """Of each set that was evaluated at two steps."""


def findings_of(run: ShownRun) -> Findings:
    sets = evaluated_sets(run.evaluation)
    return Findings(
        run=run,
        signals=env_signals(run.training),
        sets=sets,
        changes={
            one.name: behaviour_changes(*(end.trajectories for end in one.pair))
            for one in sets
            if one.pair
        },
    )


Pairs = Iterable[tuple[EvalReport, EvalReport]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What one table shows, and what could not be compared."""

    caption: str
    sides: tuple[str, str]
    """`before` and `after`, or the letters of two runs."""
    comparisons: tuple[Comparison, ...]
    excuses: tuple[str, ...]


def within_runs(runs: Sequence[ShownRun]) -> list[Compared]:
    """Each run's first evaluation with its last."""
    return [
        _compared(f"{run.title}: first evaluation to last", ("before", "after"), _ends(run))
        for run in runs
    ]


def between_runs(runs: Sequence[ShownRun]) -> list[Compared]:
    """The first run's last evaluation with every other's."""
    first, *others = runs
    return [
        _compared(
            f"{first.title} against {run.title}: last evaluation of each",
            (first.mark, run.mark),
            _lasts(first, run),
            excuses=_unshared(first, run),
        )
        for run in others
    ]


def _ends(run: ShownRun) -> Pairs:
    for by_step in run.reports.values():
        if len(by_step) > 1:
            yield by_step[min(by_step)], by_step[max(by_step)]


def _lasts(one: ShownRun, other: ShownRun) -> Pairs:
    for name, by_step in one.reports.items():
        if others := other.reports.get(name):
            yield by_step[max(by_step)], others[max(others)]


def _unshared(one: ShownRun, other: ShownRun) -> Iterable[str]:
    """What one run was evaluated on and the other was not."""
    if not one.reports.keys() & other.reports.keys():
        yield (
            f"{one.title} and {other.title} share no evaluation set and are not compared: "
            f"{_sets(one)}; {_sets(other)}."
        )
        return
    for has, lacks in ((one, other), (other, one)):
        for name in sorted(has.reports.keys() - lacks.reports.keys()):
            yield f"{name} was evaluated in {has.title} only."


def _sets(run: ShownRun) -> str:
    return f"{run.title} has {', '.join(run.reports) or 'none'}"


def _compared(
    caption: str, sides: tuple[str, str], pairs: Pairs, *, excuses: Iterable[str] = ()
) -> Compared:
    comparisons, reasons = [], list(excuses)
    for before, after in pairs:
        try:
            comparisons.append(compare(before, after))
        except TaskError as error:
            reasons.append(f"{error}.")
    return Compared(
        caption=caption, sides=sides, comparisons=tuple(comparisons), excuses=tuple(reasons)
    )
