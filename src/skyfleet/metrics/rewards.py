"""Rewards: how good a batch was, and how much a policy can learn from it.

Attempts of unknown grade are in no number here but `reward/unknown_grades`; a number that would
be taken over nothing has no key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, pvariance

from skyfleet.metrics.naming import key
from skyfleet.trajectories.trajectory import Group


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Per environment and over all; n of `pass_at_n` is the attempts of the largest group."""
    if not groups:
        return {}
    n = max(len(group.trajectories) for group in groups)
    unknown = sum(len(group.trajectories) - len(group.graded) for group in groups)
    metrics = {key("reward", "unknown_grades"): float(unknown)}
    graded = [group for group in groups if group.graded]
    if not graded:
        return metrics
    rewards = [reward for group in graded for reward in group.rewards]
    metrics[key("generation", "avg_reward")] = fmean(rewards)
    metrics[key("generation", "success_rate")] = fmean(
        attempt.success is True for group in graded for attempt in group.graded
    )
    metrics[key("reward", f"avg_pass_at_{n}")] = _share_passed(graded)
    metrics[key("reward", "avg_raw_reward")] = fmean(rewards)
    metrics[key("reward", "mean_positive_reward")] = mean_positive(rewards)
    by_env: dict[str, list[Group]] = defaultdict(list)
    for group in graded:
        by_env[group.env_key].append(group)
    for env_key, of_env in sorted(by_env.items()):
        metrics[key("reward", env_key, f"pass_at_{n}")] = _share_passed(of_env)
        prompts = [group.rewards for group in of_env]
        for name, value in signal_metrics(prompts).items():
            metrics[key("reward", env_key, name)] = value
    return metrics


def trained_reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`train/*`: the rewards of the groups that are learned from, after every filter."""
    rewards = [reward for group in groups for reward in group.rewards]
    if not rewards:
        return {}
    return {
        key("train", "avg_reward"): fmean(rewards),
        key("train", "min_reward"): min(rewards),
        key("train", "max_reward"): max(rewards),
    }


def signal_metrics(rewards_by_prompt: Sequence[Sequence[float]]) -> dict[str, float]:
    """`mean_positive_reward`; and over prompts with two attempts or more, what there is to learn.

    `variance_per_prompt` is the mean population variance, `signal_ratio` the share above zero.
    """
    metrics: dict[str, float] = {}
    if rewards := [reward for prompt in rewards_by_prompt for reward in prompt]:
        metrics["mean_positive_reward"] = mean_positive(rewards)
    # statistics.pvariance is exact: three rewards of 0.1 have no variance, as they should.
    if variances := [pvariance(prompt) for prompt in rewards_by_prompt if len(prompt) > 1]:
        metrics["variance_per_prompt"] = fmean(variances)
        metrics["signal_ratio"] = fmean(variance > 0 for variance in variances)
    return metrics


def mean_positive(rewards: Iterable[float]) -> float:
    """Mean of the rewards above zero; zero when none is."""
    positive = [reward for reward in rewards if reward > 0]
    return fmean(positive) if positive else 0.0


def _share_passed(groups: Sequence[Group]) -> float:
    return fmean(any(attempt.success for attempt in group.graded) for group in groups)
