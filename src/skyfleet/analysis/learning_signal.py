"""Learning signal: how many groups of each environment have mixed rewards, with advice.

A group is the attempts at one task in one step. GRPO only learns from groups whose rewards differ.
Ungraded attempts are only in `n_unknown` and `n_wasted`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean, pvariance

from skyfleet.analysis.formatting import percent
from skyfleet.metrics.intervals import pass_at_k, pass_hat_k
from skyfleet.trajectories.entry import Entry

Counts = tuple[int, int]
"""The attempts at a task, and the number of passes."""
GROUP_SIZES = (4, 8, 16, 32, 64)
_SATURATED = 0.95
_MANY_UNKNOWN = 0.1
_WELL_MIXED = 0.5
_MAX_GROUP_GROWTH = 4
"""Groups that are larger by more than this factor cost more than they help."""
_MIN_YIELD = 0.75
"""Suggest a larger group if the mixed groups per rollout stay above this share of today's."""
Groups = Mapping[tuple[int, str], Sequence[Entry]]
"""By step and task."""


def expected_mixed_share(counts: Sequence[Counts], size: int) -> float:
    """The expected share of mixed groups. `([(4, 1)], 2)` gives 0.5: half of the six pairs."""
    if size <= min(attempts for attempts, _ in counts):
        return fmean(pass_at_k(n, c, size) - pass_hat_k(n, c, size) for n, c in counts)
    return _beta_binomial(counts, size)


def _beta_binomial(counts: Sequence[Counts], size: int) -> float:
    import numpy as np
    from scipy.special import betaln

    n, c = np.array(counts, dtype=float).T
    # Jeffreys' prior of half a pass and half a failure keeps the mean away from 0 and 1.
    mean = (c.sum() + 0.5) / (n.sum() + 1)
    strength_S = np.geomspace(1e-4, 1000, 71)
    a_S, b_S = mean * strength_S, (1 - mean) * strength_S
    # Many tasks have equal counts; compute their likelihood once.
    kinds, repeats = np.unique(np.stack([n, c]), axis=1, return_counts=True)
    n_K, c_K = kinds[0, :, None], kinds[1, :, None]
    fit_S = repeats @ (betaln(a_S + c_K, b_S + n_K - c_K) - betaln(a_S, b_S))
    # A uniform prior over the correlation 1 / (1 + strength) of two attempts at a task; otherwise
    # the ends of the grid would decide the result if there are few tasks.
    fit_S += np.log(strength_S) - 2 * np.log1p(strength_S)
    weights_S = np.exp(fit_S - fit_S.max())
    alike_S = np.exp(betaln(a_S + size, b_S) - betaln(a_S, b_S))
    alike_S += np.exp(betaln(a_S, b_S + size) - betaln(a_S, b_S))
    return float(1 - weights_S @ alike_S / weights_S.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    n_steps: int
    n_groups: int
    """Groups with at least two graded attempts; all shares of groups are over these."""
    n_attempts: int
    n_unknown: int
    n_wasted: int
    """Attempts without a training signal: ungraded, or in a group whose rewards are equal."""
    n_passed: int
    pass_rate: float
    """Over the graded attempts; 0 if there are none."""
    variance_per_prompt: float
    """Mean over groups of the population variance of the rewards."""
    mixed_groups: float
    """Share of groups whose rewards differ."""
    all_passed: float
    none_passed: float
    steps_with_signal: float
    """Share of steps with at least one mixed group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSignal:
    env_key: str
    group_size: int
    """The most frequent number of attempts per group."""
    whole_run: Signal
    recent: Signal
    """Over the last quarter of the steps, on which the advice is based."""
    mixed_at: Mapping[int, float]
    """Expected share of mixed groups by group size, at the recent pass rates."""

    @property
    def advice(self) -> str:
        """One sentence: the first advice that applies."""
        name, recent = self.env_key, self.recent
        if recent.n_attempts and recent.n_unknown / recent.n_attempts > _MANY_UNKNOWN:
            share = recent.n_unknown / recent.n_attempts
            return (
                f"{name}: {percent(share)} of the attempts are ungraded; fix the environment first."
            )
        if not recent.n_groups:
            return (
                f"{name}: no group has two graded attempts; raise generator.n_samples_per_prompt."
            )
        if recent.pass_rate >= _SATURATED:
            return (
                f"{name} is saturated (pass rate {recent.pass_rate:.2f}); "
                "drop it or raise its difficulty."
            )
        if recent.mixed_groups >= _WELL_MIXED:
            return (
                f"{name}: {percent(recent.mixed_groups)} of groups have mixed outcomes "
                f"(pass rate {recent.pass_rate:.2f}), good learning signal."
            )
        if not recent.n_passed and recent.mixed_groups == 0:
            return (
                f"{name}: none of the last {recent.n_attempts} attempts passed; "
                "start with easier tasks or a longer warm start."
            )
        return self._group_size_advice()

    def _group_size_advice(self) -> str:
        p, mixed = self.recent.pass_rate, self.recent.mixed_groups
        now = f"{self.env_key}: {percent(mixed)} of groups have mixed outcomes (pass rate {p:.2f})"
        larger = {
            size: share
            for size, share in self.mixed_at.items()
            if self.group_size < size <= _MAX_GROUP_GROWTH * self.group_size
        }
        for size, share in larger.items() if p < 0.5 else ():
            # Compare mixed groups per rollout; a larger group only keeps up if passes are rare.
            if share >= _WELL_MIXED and share * self.group_size >= _MIN_YIELD * mixed * size:
                return (
                    f"{now}; groups of {size} would be mixed {percent(share)} of the time, "
                    "with nearly as many mixed groups per rollout."
                )
        estimate = ""
        if larger:
            size = max(larger)
            estimate = (
                f"groups of {size} would be mixed {percent(larger[size])} of the time, "
                f"for {size / self.group_size:.2g} times the rollouts; "
            )
        harder = "" if p < 0.5 else " or raise its difficulty"
        return (
            f"{now}; {estimate}sample the tasks that sometimes pass "
            f"(trainer.curriculum=true){harder}."
        )


def first_and_last_quarter(steps: Iterable[int]) -> tuple[list[int], list[int]]:
    """The first and last quarter of the steps, rounded up. `range(5)` gives [0, 1] and [3, 4]."""
    ordered = sorted(set(steps))
    n = ceil(len(ordered) / 4)
    return ordered[:n], ordered[len(ordered) - n :]


def compute_signals(entries: Sequence[Entry]) -> dict[str, EnvSignal]:
    """By environment, over the training entries."""
    by_env: dict[str, dict[tuple[int, str], list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        if entry.kind == "train":
            by_env[entry.env_key][entry.step, entry.task_key].append(entry)
    return {env_key: _env_signal(env_key, groups) for env_key, groups in sorted(by_env.items())}


def _env_signal(env_key: str, groups: Groups) -> EnvSignal:
    _, last = first_and_last_quarter(step for step, _ in groups)
    late = {key: group for key, group in groups.items() if key[0] >= last[0]}
    counts = _counts(late)
    return EnvSignal(
        env_key=env_key,
        group_size=Counter(map(len, groups.values())).most_common(1)[0][0],
        whole_run=_signal(groups),
        recent=_signal(late),
        mixed_at={size: expected_mixed_share(counts, size) for size in GROUP_SIZES}
        if counts
        else {},
    )


def _signal(groups: Groups) -> Signal:
    rewards = {
        key: [entry.reward for entry in group if entry.reward is not None]
        for key, group in groups.items()
    }
    # statistics.pvariance is exact, so three rewards of 0.1 have variance 0.
    variances = {key: pvariance(known) for key, known in rewards.items() if len(known) > 1}
    steps = {step for step, _ in groups}
    entries = [entry for group in groups.values() for entry in group]
    graded = sum(map(len, rewards.values()))
    passed = sum(entry.success is True for entry in entries)
    passes = [
        [entry.success is True for entry in groups[p] if entry.reward is not None]
        for p in variances
    ]
    return Signal(
        n_steps=len(steps),
        n_groups=len(variances),
        n_attempts=len(entries),
        n_unknown=len(entries) - graded,
        n_wasted=len(entries) - sum(len(rewards[p]) for p, v in variances.items() if v > 0),
        n_passed=passed,
        pass_rate=passed / graded if graded else 0.0,
        variance_per_prompt=_mean(list(variances.values())),
        mixed_groups=_mean([v > 0 for v in variances.values()]),
        all_passed=_mean([all(group) for group in passes]),
        none_passed=_mean([not any(group) for group in passes]),
        steps_with_signal=len({step for (step, _), v in variances.items() if v > 0}) / len(steps),
    )


def _counts(groups: Groups) -> list[Counts]:
    """Per task, over all its groups."""
    attempts: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for (_, task_key), group in groups.items():
        attempts[task_key] += sum(entry.success is not None for entry in group)
        passed[task_key] += sum(entry.success is True for entry in group)
    return [(n, passed[task_key]) for task_key, n in attempts.items() if n > 1]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
