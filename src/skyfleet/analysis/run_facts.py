"""Run facts: all that an entry of the experiment log says of a run, gathered in one reading."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from skyfleet.analysis.before_after import BehaviourChange, behaviour_changes
from skyfleet.analysis.failures import FailureClass, classify
from skyfleet.analysis.reading import read_entries, warn
from skyfleet.analysis.run_folder import RunFolder
from skyfleet.analysis.signal import EnvSignal, env_signals
from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    run: RunFolder
    entries: Sequence[Entry]
    last_step: int
    comparisons: Sequence[Comparison]
    """Of the sets that were graded at two steps, the first with the last."""
    signals: Mapping[str, EnvSignal]
    changes: Mapping[str, Sequence[BehaviourChange]]
    """By set, of those played at two steps."""
    failures: Mapping[FailureClass, int]
    """At the last step of every set, the most frequent first."""
    examples: Mapping[FailureClass, str]
    """The id of one episode of each class."""
    left_out: Sequence[str]
    """What damaged files have lost, a sentence each."""


def gather_facts(run: RunFolder) -> RunFacts:
    """Evaluation episodes of the first and the last step are read, and none is kept.

    What a damaged file has lost is warned of and told, and is in no number that needs it read.
    """
    left_out: list[str] = []

    def damaged(error: RecordError) -> None:
        warn(error)
        left_out.append(str(error))

    entries = run.entries(on_damage=damaged)
    failures: Counter[FailureClass] = Counter()
    examples: dict[FailureClass, str] = {}
    changes = {}

    def last(of_step: Sequence[Entry]) -> Iterator[Trajectory]:
        for entry, trajectory in read_entries(of_step, on_damage=damaged):
            if (kind := classify(trajectory)) is not None:
                failures[kind] += 1
                examples.setdefault(kind, entry.id)
            yield trajectory

    for name, by_step in _evaluations(entries).items():
        first_step, last_step = min(by_step), max(by_step)
        after = last(by_step[last_step])
        if first_step < last_step:
            before = read_entries(by_step[first_step], on_damage=damaged)
            changes[name] = behaviour_changes((trajectory for _, trajectory in before), after)
        for _ in after:  # where nothing was compared, they are still to be classified
            pass
    return RunFacts(
        run=run,
        entries=entries,
        last_step=int(max((row["step"] for row in run.metrics()), default=0)),
        comparisons=_comparisons(run),
        signals=env_signals(entries),
        changes=changes,
        failures=dict(failures.most_common()),
        examples=examples,
        left_out=left_out,
    )


def _evaluations(entries: Sequence[Entry]) -> dict[str, dict[int, list[Entry]]]:
    """By set, then by step."""
    sets: dict[str, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        if entry.kind == "eval":
            sets[entry.set_name][entry.step].append(entry)
    return sets


def _comparisons(run: RunFolder) -> list[Comparison]:
    comparisons = []
    for by_step in run.reports().values():
        # A set with nothing graded at both steps is in no table; the others still are.
        with suppress(TaskError):
            if len(by_step) > 1:
                comparisons.append(compare(by_step[min(by_step)], by_step[max(by_step)]))
    return comparisons
