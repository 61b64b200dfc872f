"""Signal: what each environment had to teach over a run, and what to do about it.

A group is the attempts at one task in one step. GRPO learns from a group whose rewards differ and
from no other. Attempts of unknown grade are in no number but their own and the wasted.
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
"""Attempts at a task, and how many passed."""


def mixed_share(counts: Sequence[Counts], size: int) -> float:
    """Expected share of mixed groups. `mixed_share([(4, 1)], 2)` is 0.5: half of its six pairs."""
    if size <= min(attempts for attempts, _ in counts):
        return fmean(pass_at_k(n, c, size) - pass_hat_k(n, c, size) for n, c in counts)
    return _beta_binomial(counts, size)


def _beta_binomial(counts: Sequence[Counts], size: int) -> float:
    import numpy as np
    from scipy.special import betaln

    n, c = np.array(counts, dtype=float).T
    # Jeffreys' half a pass and half a failure keep the mean away from 0 and 1.
    mean = (c.sum() + 0.5) / (n.sum() + 1)
    strength_S = np.geomspace(1e-4, 1000, 71)
    a_S, b_S = mean * strength_S, (1 - mean) * strength_S
    # The same counts are common, and need their likelihood only once.
    kinds, repeats = np.unique(np.stack([n, c]), axis=1, return_counts=True)
    n_K, c_K = kinds[0, :, None], kinds[1, :, None]
    fit_S = repeats @ (betaln(a_S + c_K, b_S + n_K - c_K) - betaln(a_S, b_S))
    # Before the counts, every correlation 1 / (1 + strength) of two attempts at a task is as likely:
    # else where the grid happens to begin would decide for few tasks.
    fit_S += np.log(strength_S) - 2 * np.log1p(strength_S)
    weights_S = np.exp(fit_S - fit_S.max())
    alike_S = np.exp(betaln(a_S + size, b_S) - betaln(a_S, b_S))
    alike_S += np.exp(betaln(a_S, b_S + size) - betaln(a_S, b_S))
    return float(1 - weights_S @ alike_S / weights_S.sum())


GROUP_SIZES = (4, 8, 16, 32, 64)
_SATURATED = 0.95
_MANY_UNKNOWN = 0.1
_WELL_MIXED = 0.5
_MOST_TIMES = 4
"""A group larger by more than this costs more than it is likely to teach."""
_NEAR = 0.75
"""A larger group is advised while a rollout yields at least this much of today's mixed groups."""

Groups = Mapping[tuple[int, str], Sequence[Entry]]
"""By step and task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    n_steps: int
    n_groups: int
    """With two known grades or more; the shares of groups are of these."""
    n_attempts: int
    n_unknown: int
    n_wasted: int
    """Attempts nothing was learned from: of unknown grade, or in a group whose rewards agree."""
    n_passed: int
    pass_rate: float
    """Of the attempts with a known grade; 0 where there is none."""
    variance_per_prompt: float
    """Mean over groups of the population variance of the rewards."""
    mixed_groups: float
    """Share of groups whose rewards differ."""
    all_passed: float
    none_passed: float
    steps_with_signal: float
    """Share of steps with at least one such group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSignal:
    env_key: str
    group_size: int
    """Attempts of the commonest group."""
    over_run: Signal
    lately: Signal
    """Over the last quarter of its steps: advice is about the policy as it is now."""
    mixed_at: Mapping[int, float]
    """Expected share of mixed groups by group size, as the policy passed lately."""

    @property
    def advice(self) -> str:
        """One sentence to act on; the first that applies."""
        name, lately = self.env_key, self.lately
        if lately.n_attempts and lately.n_unknown / lately.n_attempts > _MANY_UNKNOWN:
            share = lately.n_unknown / lately.n_attempts
            return (
                f"{name}: {percent(share)} of its grades are unknown: mend the environment first."
            )
        if not lately.n_groups:
            return f"{name}: no group has two known grades: raise generator.n_samples_per_prompt."
        if lately.pass_rate >= _SATURATED:
            return (
                f"{name} is saturated (p = {lately.pass_rate:.2f}): "
                "drop it or raise its difficulty."
            )
        if lately.mixed_groups >= _WELL_MIXED:
            return (
                f"{name} teaches: p = {lately.pass_rate:.2f}, "
                f"{percent(lately.mixed_groups)} of its groups are mixed."
            )
        if not lately.n_passed and lately.mixed_groups == 0:
            return (
                f"{name} was never passed in its last {lately.n_attempts} attempts: "
                "begin with easier tasks or a longer warm start."
            )
        return self._advice_on_size()

    def _advice_on_size(self) -> str:
        p, mixed = self.lately.pass_rate, self.lately.mixed_groups
        now = f"{self.env_key} p = {p:.2f}, {percent(mixed)} of its groups are mixed"
        larger = {
            size: share
            for size, share in self.mixed_at.items()
            if self.group_size < size <= _MOST_TIMES * self.group_size
        }
        for size, share in larger.items() if p < 0.5 else ():
            # Mixed groups a rollout, against today's: only where passing is rare do they stay near.
            if share >= _WELL_MIXED and share * self.group_size >= _NEAR * mixed * size:
                return (
                    f"{now}: a group of {size} would be so {percent(share)} of the time, "
                    "with nearly as many mixed groups a rollout."
                )
        reach = ""
        if larger:
            size = max(larger)
            reach = (
                f"a group of {size} would be so {percent(larger[size])} of the time, "
                f"for {size / self.group_size:.2g} times the rollouts: "
            )
        harder = "" if p < 0.5 else " or raise its difficulty"
        return (
            f"{now}; {reach}draw the tasks that are sometimes passed "
            f"(trainer.curriculum=true){harder}."
        )


def quarters(steps: Iterable[int]) -> tuple[list[int], list[int]]:
    """The first and the last quarter of the steps, rounded up. `quarters(range(5))` is [0, 1], [3, 4]."""
    ordered = sorted(set(steps))
    n = ceil(len(ordered) / 4)
    return ordered[:n], ordered[len(ordered) - n :]


def env_signals(entries: Sequence[Entry]) -> dict[str, EnvSignal]:
    """By environment, from the training entries among those given."""
    by_env: dict[str, dict[tuple[int, str], list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        if entry.kind == "train":
            by_env[entry.env_key][entry.step, entry.task_key].append(entry)
    return {env_key: _env_signal(env_key, groups) for env_key, groups in sorted(by_env.items())}


def _env_signal(env_key: str, groups: Groups) -> EnvSignal:
    _, last = quarters(step for step, _ in groups)
    late = {place: group for place, group in groups.items() if place[0] >= last[0]}
    counts = _counts(late)
    return EnvSignal(
        env_key=env_key,
        group_size=Counter(map(len, groups.values())).most_common(1)[0][0],
        over_run=_signal(groups),
        lately=_signal(late),
        mixed_at={size: mixed_share(counts, size) for size in GROUP_SIZES} if counts else {},
    )


def _signal(groups: Groups) -> Signal:
    rewards = {
        place: [entry.reward for entry in group if entry.reward is not None]
        for place, group in groups.items()
    }
    # statistics.pvariance is exact: three rewards of 0.1 have no variance, as they should.
    variances = {place: pvariance(known) for place, known in rewards.items() if len(known) > 1}
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
    """Of each task, over all its groups; a task drawn twice is one task."""
    attempts: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for (_, task_key), group in groups.items():
        attempts[task_key] += sum(entry.success is not None for entry in group)
        passed[task_key] += sum(entry.success is True for entry in group)
    return [(n, passed[task_key]) for task_key, n in attempts.items() if n > 1]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
