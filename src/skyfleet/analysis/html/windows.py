"""Windows: a noisy value a prompt, as a calm curve over steps with its interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, isfinite, sqrt
from statistics import fmean, stdev

from skyfleet.analysis.html.charts import Point, Range
from skyfleet.analysis.html.wording import count
from skyfleet.metrics.intervals import wilson
from skyfleet.trajectories.entry import Entry

_MOST_POINTS = 60
_SHARE = 8
"""A window is an eighth of the steps."""

Prompts = Mapping[int, Sequence[Sequence[float]]]
"""By step, the known rewards of each prompt's attempts."""

IntervalOf = Callable[[Sequence[float], Range], Range | None]
"""Of a window's values, and the range of all the values."""


def prompts_of(entries: Iterable[Entry]) -> Prompts:
    """Unknown grades are left out, and so are prompts and steps without a known one."""
    rewards: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        if entry.reward is not None and isfinite(entry.reward):
            rewards[entry.step][entry.task_key].append(entry.reward)
    return {step: list(rewards[step].values()) for step in sorted(rewards)}


def mean_rewards(prompts: Prompts) -> tuple[Point, ...]:
    """Of each prompt the mean over its attempts; then over prompts, with Student's interval."""
    return windowed(
        {step: [fmean(r) for r in of_step] for step, of_step in prompts.items()}, _student
    )


def mixed_shares(prompts: Prompts) -> tuple[Point, ...]:
    """The share of prompts whose attempts differ, with Wilson's interval.

    One known attempt says nothing."""
    mixed = {
        step: [float(min(r) < max(r)) for r in of_step if len(r) > 1]
        for step, of_step in prompts.items()
    }
    return windowed(
        {step: values for step, values in mixed.items() if values},
        lambda values, _: wilson(fmean(values), len(values)),
    )


def windowed(
    values_by_step: Mapping[int, Sequence[float]], interval_of: IntervalOf
) -> tuple[Point, ...]:
    """The mean in a window around each step, with the 95 % interval over its values."""
    steps = list(values_by_step)
    if not steps:
        return ()
    everything = [value for values in values_by_step.values() for value in values]
    bounds = min(everything), max(everything)
    reach = len(steps) // _SHARE // 2
    stride = ceil(len(steps) / _MOST_POINTS)
    points = []
    # The last step always has its point.
    for at in sorted({*range(0, len(steps), stride), len(steps) - 1}):
        near = steps[max(0, at - reach) : at + reach + 1]
        values = [value for step in near for value in values_by_step[step]]
        points.append(
            Point(
                step=steps[at],
                value=fmean(values),
                interval=interval_of(values, bounds),
                note=f", {count(len(values))} prompts",
            )
        )
    return tuple(points)


def _student(values: Sequence[float], bounds: Range) -> Range | None:
    """Within the range of all the values: a share does not fall below 0.

    Values that are all equal say nothing of how much they might have varied.
    """
    from scipy.special import stdtrit

    if min(values) == max(values):
        return None
    middle, n = fmean(values), len(values)
    half = float(stdtrit(n - 1, 0.975)) * stdev(values) / sqrt(n)
    return max(bounds[0], middle - half), min(bounds[1], middle + half)
