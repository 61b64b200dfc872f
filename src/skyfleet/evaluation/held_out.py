"""One comparison of all held-out environments together, over every evaluation set that has some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import Change, Comparison, compare
from skyfleet.evaluation.report import HELD_OUT, EvalReport
from skyfleet.evaluation.score import EnvScore, TaskOutcome


def compare_held_out(pairs: Sequence[tuple[EvalReport, EvalReport]]) -> Comparison | None:
    """The verdict on the environments that neither side trained on, such as retail and airline.

    None if one set alone holds these tasks, whose own row is this verdict, or if it is not known
    which environments were trained on. A task that is in several sets counts once.
    """
    known = [
        (before, after)
        for before, after in pairs
        if before.trained_envs is not None and after.trained_envs is not None
    ]
    sides = [_select(known, 0), _select(known, 1)]
    tasks = sides[0].keys() & sides[1].keys()
    if not tasks or any(tasks == before.outcomes.keys() for before, _ in known):
        return None
    try:
        held_out = compare(
            *(
                _merge(pair, side)
                for pair, side in zip(zip(*known, strict=True), sides, strict=True)
            )
        )
    except TaskError:  # each set's own comparison says why
        return None
    return replace(
        held_out,
        overall=_count_nothing(held_out.overall),
        by_env={env: _count_nothing(change) for env, change in held_out.by_env.items()},
    )


def _select(pairs: Sequence[tuple[EvalReport, EvalReport]], side: int) -> dict[str, TaskOutcome]:
    """The outcomes of one side in environments that no side trained on, by task key."""
    selected: dict[str, TaskOutcome] = {}
    for pair in pairs:
        trained = {env for report in pair for env in report.trained_envs or ()}
        for key, outcome in pair[side].outcomes.items():
            if outcome.env_key not in trained:
                selected.setdefault(key, outcome)
    return selected


def _merge(reports: Sequence[EvalReport], outcomes: Mapping[str, TaskOutcome]) -> EvalReport:
    return replace(
        reports[0],
        name=HELD_OUT,
        overall=EnvScore.from_outcomes(list(outcomes.values())),
        by_env={},
        outcomes=outcomes,
    )


def _count_nothing(change: Change) -> Change:
    """The tasks left out are counted in the comparisons of their sets."""
    return replace(change, n_left_out=0, n_changed=0)
