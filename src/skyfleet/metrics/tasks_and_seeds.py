"""The mean of a table of tasks by seeds, if other tasks and other seeds could have been drawn.

Evaluating more tasks says nothing about other training seeds, and training more seeds nothing about
other tasks: both are samples, so both vary the mean. A test over tasks alone takes the luck of a few
seeds for the effect of a setting; `benchmarks/sweep_verdicts.py` measures how often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from skyfleet.metrics.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossedMean:
    """Clark (1973), min F': the variances between tasks and between seeds add up.

    This counts the noise of single attempts twice, which makes it conservative where seeds do not
    differ. The degrees of freedom are Satterthwaite's.
    """

    mean: float
    standard_error: float
    degrees_of_freedom: float

    @property
    def p_value(self) -> float:
        """Two-sided, of the mean being zero."""
        from scipy.special import stdtr

        if self.standard_error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stdtr(self.degrees_of_freedom, -abs(self.mean) / self.standard_error))

    def interval(self, *, confidence: float = 0.95) -> Interval:
        half = self._quantile((1 + confidence) / 2) * self.standard_error
        return self.mean - half, self.mean + half

    def detectable(self, *, power: float = 0.8, alpha: float = 0.05) -> float:
        """The smallest true mean that is significant with probability `power`."""
        return (self._quantile(1 - alpha / 2) + self._quantile(power)) * self.standard_error

    def _quantile(self, share: float) -> float:
        from scipy.special import stdtrit

        return float(stdtrit(self.degrees_of_freedom, share))


def crossed_mean(table: Sequence[Sequence[float]]) -> CrossedMean:
    """One row per task, one column per seed; at least two of each.

    `crossed_mean([[0.2, 0.4], [0.0, 0.2]])` has mean 0.2, standard error sqrt(0.02) and 2 degrees.
    """
    n_tasks, n_seeds = len(table), len(table[0])
    if n_tasks < 2 or n_seeds < 2:
        raise ValueError(f"{n_tasks} tasks and {n_seeds} seeds; give at least two of each")
    mean = fmean(value for row in table for value in row)
    by_task = n_seeds * _mean_square([fmean(row) for row in table], mean)
    by_seed = n_tasks * _mean_square([fmean(column) for column in zip(*table, strict=True)], mean)
    together = by_task + by_seed
    squares = by_task**2 / (n_tasks - 1) + by_seed**2 / (n_seeds - 1)
    return CrossedMean(
        # Rounded, so that thirds that cancel give exactly zero.
        mean=round(mean, 12),
        standard_error=sqrt(together / (n_tasks * n_seeds)),
        degrees_of_freedom=together**2 / squares if squares else n_tasks - 1.0,
    )


def _mean_square(means: Sequence[float], mean: float) -> float:
    return sum((one - mean) ** 2 for one in means) / (len(means) - 1)
