"""Behaviour summary: turns, tools, endings and failures per environment, in one pass.

Reads one episode at a time and keeps none, so a run of any length fits in memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skyfleet.analysis.before_after import EpisodeOutcome, FailureShift, compute_failure_shifts
from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.failures import classify
from skyfleet.analysis.run_folder import OnDamage, read_entries
from skyfleet.analysis.tool_results import list_tool_results
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Ending, Trajectory

_EXAMPLES = 3
"""Example episodes per failure class and environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvBehaviour:
    """Sums over the episodes of one environment."""

    env_key: str
    n_episodes: int
    n_passed: int
    n_unknown: int
    """Ungraded episodes."""
    turns: int
    malformed_calls: int
    sampled_tokens: int
    """0 for chat APIs, which do not report tokens."""
    seconds: float
    """From reset to grade."""
    engine_seconds: float
    env_seconds: float
    endings: Mapping[Ending, int]
    tool_calls: Mapping[str, int]
    """By the called name, whether or not the tool exists; most frequent first."""
    tool_errors: Mapping[str, int]
    failures: Mapping[FailureClass, int]
    examples: Mapping[FailureClass, tuple[str, ...]]
    """Episode ids."""

    @property
    def n_graded(self) -> int:
        return self.n_episodes - self.n_unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailures:
    """An evaluation set at one step."""

    n_episodes: int
    failures: Mapping[FailureClass, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    by_env: Mapping[str, EnvBehaviour]
    by_set: Mapping[str, Mapping[int, StepFailures]]
    """By evaluation set, then by step; without training episodes."""
    shifts: Mapping[str, Sequence[FailureShift]]
    """First step against last, for the sets with at least two steps."""


def summarize_behaviour(
    entries: Iterable[Entry],
    *,
    on_read: Callable[[], None] = lambda: None,
    on_damage: OnDamage | None = None,
) -> Behaviour:
    """Summarise entries, which must be in the order of `RunFolder.entries`.

    With `on_damage` a damaged file is reported and its remaining episodes are skipped.
    """
    envs: dict[str, _Tally] = defaultdict(_Tally)
    sets: dict[str, dict[int, list[EpisodeOutcome]]] = defaultdict(lambda: defaultdict(list))
    for entry, trajectory in read_entries(entries, on_damage=on_damage):
        failure = classify(trajectory)
        envs[entry.env_key].add(entry, trajectory, failure)
        if entry.kind == "eval":
            sets[entry.set_name][entry.step].append(((entry.env_key, entry.task_key), failure))
        on_read()
    return Behaviour(
        by_env={env_key: envs[env_key].finish(env_key) for env_key in sorted(envs)},
        by_set={
            name: {step: _step_failures(steps[step]) for step in sorted(steps)}
            for name, steps in sets.items()
        },
        shifts={
            name: compute_failure_shifts(steps[min(steps)], steps[max(steps)])
            for name, steps in sets.items()
            if len(steps) > 1
        },
    )


def _step_failures(episodes: Sequence[EpisodeOutcome]) -> StepFailures:
    failures = Counter(failure for _, failure in episodes if failure is not None)
    return StepFailures(n_episodes=len(episodes), failures=dict(failures.most_common()))


@dataclass(slots=True)
class _Tally:
    n_episodes: int = 0
    n_passed: int = 0
    n_unknown: int = 0
    turns: int = 0
    malformed_calls: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    engine_seconds: float = 0.0
    env_seconds: float = 0.0
    endings: Counter[Ending] = field(default_factory=Counter)
    tool_calls: Counter[str] = field(default_factory=Counter)
    tool_errors: Counter[str] = field(default_factory=Counter)
    failures: Counter[FailureClass] = field(default_factory=Counter)
    examples: dict[FailureClass, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, entry: Entry, trajectory: Trajectory, failure: FailureClass | None) -> None:
        self.n_episodes += 1
        self.n_passed += entry.success is True
        self.n_unknown += entry.success is None
        self.turns += entry.turns
        self.malformed_calls += entry.malformed_calls
        self.sampled_tokens += entry.sampled_tokens
        self.seconds += entry.seconds
        self.endings[entry.ending] += 1
        for turn in trajectory.turns:
            self.engine_seconds += turn.engine_seconds
            self.env_seconds += turn.env_seconds
            self.tool_calls.update(call.name for call in turn.action.tool_calls)
        self.tool_errors.update(
            result.name
            for result in list_tool_results(trajectory)
            if result.name and result.is_error
        )
        if failure is not None:
            self.failures[failure] += 1
            if len(self.examples[failure]) < _EXAMPLES:
                self.examples[failure].append(entry.id)

    def finish(self, env_key: str) -> EnvBehaviour:
        return EnvBehaviour(
            env_key=env_key,
            n_episodes=self.n_episodes,
            n_passed=self.n_passed,
            n_unknown=self.n_unknown,
            turns=self.turns,
            malformed_calls=self.malformed_calls,
            sampled_tokens=self.sampled_tokens,
            seconds=self.seconds,
            engine_seconds=self.engine_seconds,
            env_seconds=self.env_seconds,
            endings=dict(self.endings.most_common()),
            tool_calls=dict(self.tool_calls.most_common()),
            tool_errors=dict(self.tool_errors.most_common()),
            failures=dict(self.failures.most_common()),
            examples={kind: tuple(ids) for kind, ids in self.examples.items()},
        )
