"""Behaviour before and after: compare episodes of the same tasks at two steps or of two runs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from statistics import fmean

from skyfleet.analysis.failure_class import FailureClass
from skyfleet.chat.message import Message
from skyfleet.metrics.intervals import cluster_bootstrap, paired_difference
from skyfleet.trajectories.entry import sampled_tokens, tool_errors
from skyfleet.trajectories.trajectory import Trajectory, Turn

Row = tuple[Turn | None, Turn | None]
"""Two turns side by side; None if the other episode has no counterpart."""
SAMPLED_TOKENS = "sampled tokens"
PLAIN_QUANTITIES = ("turns", "tool calls", "tool errors", "malformed calls", SAMPLED_TOKENS)
PASSED = "passed"
_ORDER = (PASSED, *map(str, FailureClass))
EpisodeOutcome = tuple[Hashable, FailureClass | None]
"""The task of an episode, and its failure class; None if it passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviourChange:
    env_key: str
    quantity: str
    """Per episode: turns, tool calls, ..., or `calls of <tool>`."""
    n_tasks: int
    before: float
    after: float
    difference: float
    interval: tuple[float, float]
    """95 % interval of the difference, resampling tasks; attempts at a task are averaged first."""

    @property
    def is_clear(self) -> bool:
        return is_clear(self.n_tasks, self.interval)

    @property
    def is_measured(self) -> bool:
        """False for tokens that were not recorded, as with chat APIs and imported dumps."""
        return self.quantity != SAMPLED_TOKENS or bool(self.before or self.after)


def compare_behaviour(
    before: Iterable[Trajectory], after: Iterable[Trajectory]
) -> list[BehaviourChange]:
    """Compare each quantity per environment, over the tasks that both sides have."""
    one, other = _means(before), _means(after)
    tasks: dict[str, list[str]] = defaultdict(list)
    for env_key, task_key in sorted(one.keys() & other.keys()):
        tasks[env_key].append(task_key)
    changes = []
    for env_key, keys in tasks.items():
        pairs = [(one[env_key, key], other[env_key, key]) for key in keys]
        quantities = dict.fromkeys(name for pair in pairs for side in pair for name in side)
        changes += [_change(env_key, name, pairs) for name in _in_order(quantities)]
    return changes


def align_turns(before: Trajectory, after: Trajectory) -> list[Row]:
    """Align turns with equal actions; pair the turns between them in order."""
    # Before the first difference, turns pair by number; a longer match later must not shift them.
    split = find_first_divergence(before, after)
    rows: list[Row] = list(zip(before.turns[:split], after.turns[:split], strict=True))
    if split is None:
        return rows
    left, right = before.turns[split:], after.turns[split:]
    one = [format_action(turn.action) for turn in left]
    other = [format_action(turn.action) for turn in right]
    for _, a, b, c, d in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        rows += zip_longest(left[a:b], right[c:d])
    return rows


def find_first_divergence(before: Trajectory, after: Trajectory) -> int | None:
    """The index of the first turn whose actions differ; None if all are equal.

    Both episodes see the same observations up to there.
    """
    for number, (one, other) in enumerate(zip_longest(before.turns, after.turns)):
        if one is None or other is None or format_action(one.action) != format_action(other.action):
            return number
    return None


def format_action(action: Message) -> str:
    """The text and the calls of a message, such as `list_issues({"repo": "api"})`."""
    calls = [
        f"{call.name}({json.dumps(dict(call.arguments), sort_keys=True, ensure_ascii=False)})"
        for call in action.tool_calls
    ]
    return "\n".join(filter(None, (action.text, *calls, *action.malformed_calls)))


def _means(trajectories: Iterable[Trajectory]) -> dict[tuple[str, str], dict[str, float]]:
    """By environment and task: the mean of each quantity over the attempts."""
    attempts: dict[tuple[str, str], list[Counter[str]]] = defaultdict(list)
    for trajectory in trajectories:
        attempts[trajectory.env_key, trajectory.task_key].append(_quantities(trajectory))
    return {
        key: {name: fmean(one[name] for one in counts) for name in set().union(*counts)}
        for key, counts in attempts.items()
    }


def _quantities(trajectory: Trajectory) -> Counter[str]:
    actions = [turn.action for turn in trajectory.turns]
    calls = [call.name for action in actions for call in action.tool_calls]
    plain = (
        len(actions),
        len(calls),
        tool_errors(trajectory),
        sum(len(action.malformed_calls) for action in actions),
        sampled_tokens(trajectory),
    )
    counts = Counter(f"calls of {name}" for name in calls)
    counts.update(dict(zip(PLAIN_QUANTITIES, plain, strict=True)))
    return counts


def _in_order(quantities: Iterable[str]) -> list[str]:
    return [*PLAIN_QUANTITIES, *sorted(set(quantities) - set(PLAIN_QUANTITIES))]


def _change(
    env_key: str, quantity: str, pairs: Sequence[tuple[dict[str, float], dict[str, float]]]
) -> BehaviourChange:
    before = [one.get(quantity, 0.0) for one, _ in pairs]
    after = [other.get(quantity, 0.0) for _, other in pairs]
    # Rounded, so that thirds that cancel give exactly zero.
    differences = [round(b - a, 12) for a, b in zip(before, after, strict=True)]
    return BehaviourChange(
        env_key=env_key,
        quantity=quantity,
        n_tasks=len(pairs),
        before=fmean(before),
        after=fmean(after),
        difference=fmean(differences),
        interval=_interval(differences),
    )


def is_clear(n_tasks: int, interval: tuple[float, float]) -> bool:
    """Whether the interval excludes zero on enough tasks: five that agree have p = 1/16."""
    low, high = interval
    return n_tasks > 5 and (low > 0 or high < 0)


def _interval(differences: Sequence[float]) -> tuple[float, float]:
    # If all tasks agree there is nothing to resample, and Wilson's interval needs proportions.
    if min(differences) == max(differences):
        return differences[0], differences[0]
    return cluster_bootstrap(differences, n_resamples=2000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureShift:
    name: str
    """A failure class, or `passed`."""
    n_tasks: int
    before: float
    """Share of the episodes; attempts are averaged per task, and tasks have equal weight."""
    after: float
    difference: float
    interval: tuple[float, float]
    """95 % interval of the difference, paired by task, as for a change of pass@1."""

    @property
    def is_clear(self) -> bool:
        return is_clear(self.n_tasks, self.interval)


def compute_failure_shifts(
    before: Iterable[EpisodeOutcome], after: Iterable[EpisodeOutcome]
) -> list[FailureShift]:
    """The change in the share of each class that occurs, over the tasks that both sides have.

    `([("t", FailureClass.LOOP)], [("t", None)])` gives `passed` 0 to 1, then loop 1 to 0.
    """
    one, other = _class_rates(before), _class_rates(after)
    tasks = [task for task in one if task in other]
    names = {name for task in tasks for side in (one, other) for name in side[task]}
    return [
        _shift(name, [one[task] for task in tasks], [other[task] for task in tasks])
        for name in _ORDER
        if name in names
    ]


def _shift(
    name: str, one: Iterable[Mapping[str, float]], other: Iterable[Mapping[str, float]]
) -> FailureShift:
    before = [rates.get(name, 0.0) for rates in one]
    after = [rates.get(name, 0.0) for rates in other]
    # Rounded, so that thirds that cancel give exactly zero.
    differences = [round(b - a, 12) for a, b in zip(before, after, strict=True)]
    return FailureShift(
        name=name,
        n_tasks=len(before),
        before=fmean(before),
        after=fmean(after),
        difference=fmean(differences),
        # Most rates are near 0, where the bootstrap is too narrow.
        interval=paired_difference(differences),
    )


def _class_rates(episodes: Iterable[EpisodeOutcome]) -> dict[Hashable, dict[str, float]]:
    counts: dict[Hashable, Counter[str]] = defaultdict(Counter)
    for task, failure in episodes:
        counts[task][str(failure or PASSED)] += 1
    return {
        task: {name: n / task_counts.total() for name, n in task_counts.items()}
        for task, task_counts in counts.items()
    }
