"""Every batch holds tasks of every environment, as `trainer.min_samples_per_env` says."""

from __future__ import annotations

from collections import Counter

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Played


def env_balance(played: Played) -> Finding | None:
    expected = played.expected
    for start in range(0, len(played.groups), expected.batch_size):
        batch = played.groups[start : start + expected.batch_size]
        counts = Counter(group.env_key for group in batch)
        for env_key in sorted(expected.envs):
            if counts[env_key] < expected.min_per_env:
                return found(
                    "a batch has fewer tasks of an environment than trainer.min_samples_per_env",
                    env=env_key,
                    tasks=counts[env_key],
                    wanted=expected.min_per_env,
                )
    return None
