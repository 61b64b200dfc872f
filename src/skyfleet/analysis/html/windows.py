"""Windows: a noisy value a prompt, as a calm curve over steps with its interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite, sqrt
from statistics import fmean, stdev

from skyfleet.analysis.html.charts import Point
from skyfleet.analysis.html.wording import count
from skyfleet.trajectories.entry import Entry

_MOST_POINTS = 60
_SHARE = 8
"""A window is an eighth of the steps."""

Prompts = Mapping[int, Sequence[Sequence[float]]]
"""By step, the known rewards of each prompt's attempts."""


def prompts_of(entries: Iterable[Entry]) -> Prompts:
    """Unknown grades are left out, and so are prompts and steps without a known one."""
    rewards: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        if entry.reward is not None and isfinite(entry.reward):
            rewards[entry.step][entry.task_key].append(entry.reward)
    return {step: list(rewards[step].values()) for step in sorted(rewards)}


def mean_rewards(prompts: Prompts) -> tuple[Point, ...]:
    return windowed({step: [fmean(r) for r in of_step] for step, of_step in prompts.items()})


def mixed_shares(prompts: Prompts) -> tuple[Point, ...]:
    """The share of prompts whose attempts differ; one known attempt says nothing."""
    mixed = {
        step: [float(min(r) < max(r)) for r in of_step if len(r) > 1]
        for step, of_step in prompts.items()
    }
    return windowed({step: values for step, values in mixed.items() if values})


def windowed(values_by_step: Mapping[int, Sequence[float]]) -> tuple[Point, ...]:
    """The mean in a window around each step, with Student's 95 % interval over its values.

    No interval leaves the range of all the values: a share does not fall below 0.
    """
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
        points.append(_mean(steps[at], [v for s in near for v in values_by_step[s]], bounds))
    return tuple(points)


def _mean(step: int, values: Sequence[float], bounds: tuple[float, float]) -> Point:
    from scipy.special import stdtrit

    middle, n, interval = fmean(values), len(values), None
    if n > 1:
        half = float(stdtrit(n - 1, 0.975)) * stdev(values) / sqrt(n)
        interval = max(bounds[0], middle - half), min(bounds[1], middle + half)
    return Point(step=step, value=middle, interval=interval, note=f", {count(n)} prompts")
