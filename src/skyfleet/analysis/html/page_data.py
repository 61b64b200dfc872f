"""The data of the page: each run read once, its evaluated sets, findings and comparisons."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from skyfleet.analysis.before_after import BehaviourChange, EpisodeOutcome, compare_behaviour
from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.failures import classify
from skyfleet.analysis.learning_signal import EnvSignal, compute_signals, first_and_last_quarter
from skyfleet.analysis.missing_episodes import find_missing_episodes
from skyfleet.analysis.run_folder import RunFolder, read_entries
from skyfleet.errors import SkyfleetError, TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.evaluation.held_out import compare_held_out
from skyfleet.evaluation.report import EvalReport
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRun:
    folder: RunFolder
    slot: int
    alone: bool
    """Whether it is the only run on the page; then it has no letter."""
    metrics: tuple[Mapping[str, float], ...]
    timing: tuple[Mapping[str, float], ...]
    reports: Mapping[str, Mapping[int, EvalReport]]
    training: tuple[Entry, ...]
    evaluation: tuple[Entry, ...]
    notes: tuple[str, ...]
    """One sentence per file of episodes that cannot be read, and one if the folder lacks some."""

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def mark(self) -> str:
        """`A` for the first of several."""
        return "" if self.alone else slot_letters(self.slot)

    @property
    def title(self) -> str:
        return f"{self.mark} {self.name}".strip()

    @property
    def last_step(self) -> int:
        return int(max((row["step"] for row in self.metrics), default=0))

    def view_command(self, entry_id: str) -> str:
        """The command that opens the episode in the viewer."""
        return shlex.join(("skyfleet", "view", self.folder.place, "--episode", entry_id))


def read_runs(folders: Sequence[RunFolder]) -> list[ReportRun]:
    return [
        _read(folder, slot=slot, alone=len(folders) == 1) for slot, folder in enumerate(folders)
    ]


def training_envs(runs: Iterable[ReportRun]) -> list[str]:
    return sorted({entry.env_key for run in runs for entry in run.training})


def first_and_last_entries(run: ReportRun) -> tuple[list[Entry], list[Entry]]:
    """The training episodes of the first and last quarter of the steps."""
    first, last = (
        set(steps) for steps in first_and_last_quarter(entry.step for entry in run.training)
    )
    return (
        [entry for entry in run.training if entry.step in first],
        [entry for entry in run.training if entry.step in last],
    )


def _read(folder: RunFolder, *, slot: int, alone: bool) -> ReportRun:
    notes: list[str] = []
    entries = folder.entries(on_damage=lambda error: notes.append(f"Skipped: {error}."))
    if (missing := find_missing_episodes(folder)) is not None:
        notes.append(f"Incomplete: {missing.describe()}.")
    return ReportRun(
        folder=folder,
        slot=slot,
        alone=alone,
        metrics=tuple(folder.metrics()),
        timing=tuple(folder.timing()),
        reports=folder.reports(),
        training=tuple(entry for entry in entries if entry.kind == "train"),
        evaluation=tuple(entry for entry in entries if entry.kind == "eval"),
        notes=tuple(notes),
    )


def slot_letters(slot: int) -> str:
    """A to Z, then A2 to Z2."""
    round_, letter = divmod(slot, len(ascii_uppercase))
    return ascii_uppercase[letter] + (str(round_ + 1) if round_ else "")


Episode = tuple[Entry, Trajectory, FailureClass | None]
"""The failure class is None if it passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedStep:
    """The episodes of an evaluation set at one step."""

    step: int
    episodes: tuple[Episode, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for _, trajectory, _ in self.episodes]

    @property
    def outcomes(self) -> list[EpisodeOutcome]:
        return [((entry.env_key, entry.task_key), failure) for entry, _, failure in self.episodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSet:
    name: str
    ends: tuple[EvaluatedStep, ...]
    """First and last step; one if it was evaluated once, none if neither can be read."""
    notes: tuple[str, ...]
    """One sentence per file that is skipped because it cannot be read."""

    @property
    def pair(self) -> tuple[EvaluatedStep, EvaluatedStep] | None:
        """The first and last step; None unless there are two."""
        return (self.ends[0], self.ends[1]) if len(self.ends) == 2 else None


def read_evaluated_sets(entries: Sequence[Entry]) -> list[EvaluatedSet]:
    files: dict[str, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        files[entry.set_name][entry.step].append(entry)
    return [
        _read_set(name, [by_step[step] for step in sorted({min(by_step), max(by_step)})])
        for name, by_step in files.items()
    ]


def _read_set(name: str, files: Sequence[Sequence[Entry]]) -> EvaluatedSet:
    ends, notes = [], []
    for entries in files:
        step = entries[0].step
        try:
            episodes = tuple((e, t, classify(t)) for e, t in read_entries(entries))
        except (SkyfleetError, OSError) as error:
            notes.append(f"{name} at step {step} is skipped: {error}.")
        else:
            ends.append(EvaluatedStep(step=step, episodes=episodes))
    return EvaluatedSet(name=name, ends=tuple(ends), notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFindings:
    run: ReportRun
    signals: Mapping[str, EnvSignal]
    """By environment."""
    sets: Sequence[EvaluatedSet]
    changes: Mapping[str, Sequence[BehaviourChange]]
    """By set, for the sets that were evaluated at two steps."""


def analyze_run(run: ReportRun) -> RunFindings:
    sets = read_evaluated_sets(run.evaluation)
    return RunFindings(
        run=run,
        signals=compute_signals(run.training),
        sets=sets,
        changes={
            one.name: compare_behaviour(*(end.trajectories for end in one.pair))
            for one in sets
            if one.pair
        },
    )


Pairs = Iterable[tuple[EvalReport, EvalReport]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonTable:
    """The comparisons of one table, and notes about what could not be compared."""

    caption: str
    sides: tuple[str, str]
    """`before` and `after`, or the letters of two runs."""
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]


def within_runs(runs: Sequence[ReportRun]) -> list[ComparisonTable]:
    """Compare the first evaluation of each run with its last."""
    return [
        _build_table(
            f"{run.title}: first evaluation to last",
            ("before", "after"),
            _first_and_last_reports(run),
        )
        for run in runs
    ]


def between_runs(runs: Sequence[ReportRun]) -> list[ComparisonTable]:
    """Compare the last evaluation of the first run with that of every other run."""
    first, *others = runs
    return [
        _build_table(
            f"{first.title} against {run.title}: last evaluation of each",
            (first.mark, run.mark),
            _last_reports(first, run),
            notes=_unshared_sets(first, run),
        )
        for run in others
    ]


def _first_and_last_reports(run: ReportRun) -> Pairs:
    for by_step in run.reports.values():
        if len(by_step) > 1:
            yield by_step[min(by_step)], by_step[max(by_step)]


def _last_reports(one: ReportRun, other: ReportRun) -> Pairs:
    for name, by_step in one.reports.items():
        if others := other.reports.get(name):
            yield by_step[max(by_step)], others[max(others)]


def _unshared_sets(one: ReportRun, other: ReportRun) -> Iterable[str]:
    """Notes about the sets that only one of the runs was evaluated on."""
    if not one.reports.keys() & other.reports.keys():
        yield (
            f"{one.title} and {other.title} have no evaluation set in common and are not compared: "
            f"{_list_sets(one)}; {_list_sets(other)}."
        )
        return
    for has, lacks in ((one, other), (other, one)):
        for name in sorted(has.reports.keys() - lacks.reports.keys()):
            yield f"{name} was only evaluated in {has.title}."


def _list_sets(run: ReportRun) -> str:
    return f"{run.title} has {', '.join(run.reports) or 'none'}"


def _build_table(
    caption: str, sides: tuple[str, str], pairs: Pairs, *, notes: Iterable[str] = ()
) -> ComparisonTable:
    comparisons, reasons, both = [], list(notes), list(pairs)
    for before, after in both:
        try:
            comparisons.append(compare(before, after))
        except TaskError as error:
            reasons.append(f"{error}.")
    if (held_out := compare_held_out(both)) is not None:
        comparisons.append(held_out)
    return ComparisonTable(
        caption=caption, sides=sides, comparisons=tuple(comparisons), notes=tuple(reasons)
    )
