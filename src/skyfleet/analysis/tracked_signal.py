"""Learning signal of a run that another team tracked, from its metrics alone.

GRPO learns from a group only if its rewards differ. `reward/{env}/variance_per_prompt`, the mean
variance of the rewards of a step's groups, is above 0 in a step with at least one such group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from skyfleet.analysis.formatting import percent
from skyfleet.errors import ConfigError

MIN_STEPS_WITH_SIGNAL = 0.25
"""Below it an environment is too hard or too easy for the current model."""
_VARIANCE = re.compile(r"reward/(?P<env>[^/]+)/variance_per_prompt")
_PASS_AT = re.compile(r"reward/(?P<env>[^/]+)/pass_at_(?P<n>\d+)")
_EVAL_PASS_AT = re.compile(r"eval/(?P<env>[^/]+)/pass_at_(?P<n>\d+)")
_HARD, _EASY = 0.1, 0.9

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedSignal:
    env_key: str
    n_steps: int
    """Steps that logged the environment."""
    variance_per_prompt: float
    """Mean over these steps."""
    steps_with_signal: float
    """Share of these steps with a variance above 0."""
    recent_steps_with_signal: float
    """The same over the last quarter of these steps."""
    signal_ratio: float | None
    """Mean share of groups with mixed rewards; None if the run does not log it."""
    pass_rate: float | None
    """Mean of `pass_at_{n}` for the largest n, or of `mean_positive_reward`; None without both."""
    pass_metric: str
    """Which of these: `pass@4`, or `mean positive reward`; empty without both."""
    eval_first: float | None
    eval_last: float | None
    """`eval/{env}/pass_at_{k}` for the largest k."""
    eval_metric: str
    """Such as `pass@2`; empty without evaluations."""

    @property
    def advice(self) -> str:
        share = self.steps_with_signal
        where = f"{self.env_key}: {percent(share)} of {self.n_steps} steps have a learning signal"
        if share < MIN_STEPS_WITH_SIGNAL:
            return f"{where}, below {percent(MIN_STEPS_WITH_SIGNAL)}: {self._explain()}."
        if self.recent_steps_with_signal < MIN_STEPS_WITH_SIGNAL:
            recent = percent(self.recent_steps_with_signal)
            return f"{where}, but {recent} of the last quarter: {self._explain()}."
        return f"{where}."

    def _explain(self) -> str:
        if self.pass_rate is not None and self.pass_rate <= _HARD:
            return "too hard for the current model; start with easier tasks or a longer warm start"
        if self.pass_rate is not None and self.pass_rate >= _EASY:
            return "too easy for the current model; drop it or raise its difficulty"
        return "too hard or too easy for the current model; use larger groups or mixed tasks"


def compute_tracked_signals(rows: Rows) -> list[TrackedSignal]:
    """One per environment, by name; raises ConfigError if the run logs no variance."""
    envs = sorted(
        {found["env"] for row in rows for key in row if (found := _VARIANCE.fullmatch(key))}
    )
    if not envs:
        logged = sorted({key.split("/")[0] for row in rows for key in row if "/" in key})
        raise ConfigError(
            "the run logs no reward/{env}/variance_per_prompt, from which the learning signal is "
            f"computed; it has {len(rows)} rows with {', '.join(logged) or 'no metrics'}"
        )
    return [_compute_signal(env_key, rows) for env_key in envs]


def _compute_signal(env_key: str, rows: Rows) -> TrackedSignal:
    variances = list(_values(rows, f"reward/{env_key}/variance_per_prompt"))
    recent = variances[-max(1, round(len(variances) / 4)) :]
    ratios = list(_values(rows, f"reward/{env_key}/signal_ratio"))
    pass_metric, passes = _find_pass_rates(rows, _PASS_AT, env_key)
    if not passes:
        passes = list(_values(rows, f"reward/{env_key}/mean_positive_reward"))
        pass_metric = "mean positive reward" if passes else ""
    eval_metric, evaluated = _find_pass_rates(rows, _EVAL_PASS_AT, env_key)
    return TrackedSignal(
        env_key=env_key,
        n_steps=len(variances),
        variance_per_prompt=fmean(variances),
        steps_with_signal=fmean(value > 0 for value in variances),
        recent_steps_with_signal=fmean(value > 0 for value in recent),
        signal_ratio=fmean(ratios) if ratios else None,
        pass_rate=fmean(passes) if passes else None,
        pass_metric=pass_metric,
        eval_metric=eval_metric,
        eval_first=evaluated[0] if evaluated else None,
        eval_last=evaluated[-1] if evaluated else None,
    )


def _values(rows: Rows, key: str) -> Iterator[float]:
    return (row[key] for row in rows if key in row)


def _find_pass_rates(rows: Rows, pattern: re.Pattern[str], env_key: str) -> tuple[str, list[float]]:
    """`pass@n` for the largest n that the run logs, and its values."""
    numbers = {
        int(found["n"])
        for row in rows
        for key in row
        if (found := pattern.fullmatch(key)) and found["env"] == env_key
    }
    if not numbers:
        return "", []
    prefix, n = pattern.pattern.split("/")[0], max(numbers)
    return f"pass@{n}", list(_values(rows, f"{prefix}/{env_key}/pass_at_{n}"))
