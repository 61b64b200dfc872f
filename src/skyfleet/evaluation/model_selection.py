"""Best: which of a run's evaluations was the best, by a test and not by the luckiest draw.

The first evaluation holds the place. A later one takes it when it is better by a one-sided paired
test, task by task, at its share of 5 %. The shares of all looks, however many come, add up to
5 %, so a run that never gets better keeps its first step in 95 of 100 runs (union bound; the looks
share the holder's draw, so nothing that needs independence would do).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import difference_and_p, pair_tasks
from skyfleet.evaluation.report import EvalReport

ALPHA = 0.05
_ZETA = 2.612375348685488
"""The sum of k ** -1.5 over all k from 1: the shares fall slowly and still have a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One evaluation against the holder of the place at that time."""

    step: int
    holder: int
    """The step it was compared with."""
    difference: float
    p_value: float
    """One-sided: that it is better."""
    share: float
    """Of the 5 %; a p below it takes the place."""

    @property
    def better(self) -> bool:
        return self.p_value < self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    step: int
    looks: tuple[Look, ...]


def best_step(reports: Sequence[EvalReport], *, alpha: float = ALPHA) -> Best:
    """Of one set's reports in the order of their steps; those without a grade are passed over.

    So is one that has no graded task in common with the holder. A later report never changes what
    was said before it, so it may be asked after each one.
    """
    graded = [r for r in reports if any(outcome.rewards for outcome in r.outcomes.values())]
    if not graded:
        raise TaskError(f"none of {len(reports)} reports has a grade; evaluate once with grades")
    holder, *challengers = graded
    looks: list[Look] = []
    for challenger in challengers:
        try:
            difference, p_value = difference_and_p(pair_tasks(holder, challenger))
        except TaskError:
            continue
        # Both tests are symmetric: half of p lies on the side that was seen.
        half = p_value / 2
        look = Look(
            step=challenger.step,
            holder=holder.step,
            difference=difference,
            p_value=half if difference > 0 else 1 - half,
            share=alpha * (len(looks) + 1) ** -1.5 / _ZETA,
        )
        looks.append(look)
        if look.better:
            holder = challenger
    return Best(step=holder.step, looks=tuple(looks))
