"""Menus: what episodes can be filtered by, each counted under the other filters."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple, get_args

from skyfleet.analysis.viewer.classes import Classes
from skyfleet.analysis.viewer.listing import Snapshot
from skyfleet.analysis.viewer.query import Outcome, Query, outcome_of


class Facts(NamedTuple):
    """What the menus know of an episode, in the order of the menus."""

    env: str
    outcome: str
    where: str
    """`train`, or `eval:` and the set."""
    step: int
    failure_class: str


Tally = Counter[Facts]


def tally(snapshot: Snapshot, classes: Classes) -> Tally:
    """How many episodes there are of each kind."""
    return Counter(
        Facts(
            entry.env_key,
            outcome_of(entry.success),
            f"eval:{entry.set_name}" if entry.kind == "eval" else entry.kind,
            entry.step,
            "" if entry.success else classes.of(entry),
        )
        for entry in snapshot.entries
    )


def menus(counts: Tally, query: Query, failure_class: str) -> dict[str, dict[str, int]]:
    """By menu, its values and how many episodes each would leave, the other menus as they are."""
    found: tuple[Counter[Any], ...] = tuple(Counter() for _ in Facts._fields)
    for facts, n in counts.items():
        missed = [at for at, holds in enumerate(_holds(facts, query, failure_class)) if not holds]
        for at in range(len(facts)) if not missed else missed if len(missed) == 1 else ():
            found[at][facts[at]] += n
    env, outcome, where, step, classes = found
    classes.pop("", None)
    return {
        "env": dict(sorted(env.items())),
        "outcome": {name: outcome[name] for name in get_args(Outcome) if name in outcome},
        "where": dict(sorted(where.items())),
        "step": {str(number): step[number] for number in sorted(step)},
        "class": dict(classes.most_common()),
    }


def by_env(counts: Tally) -> dict[str, Counter[str]]:
    """How often each environment was passed, failed, or left unknown, whatever is asked for."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for facts, n in sorted(counts.items()):
        found[facts.env][facts.outcome] += n
    return found


def _holds(facts: Facts, query: Query, failure_class: str) -> tuple[bool, ...]:
    """Menu by menu, whether the episode is asked for."""
    kind, _, set_name = facts.where.partition(":")
    return (
        not query.env or facts.env == query.env,
        not query.outcome or facts.outcome == query.outcome,
        query.kind in ("", kind) and query.set_name in ("", set_name),
        query.step is None or facts.step == query.step,
        not failure_class or facts.failure_class == failure_class,
    )
