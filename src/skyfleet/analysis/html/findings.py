"""Findings: what is worked out of one run once, for all the sections that show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyfleet.analysis.before_after import BehaviourChange, behaviour_changes
from skyfleet.analysis.html.evaluated_set import EvaluatedSet, evaluated_sets
from skyfleet.analysis.html.shown_run import ShownRun
from skyfleet.analysis.signal import EnvSignal, env_signals


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
