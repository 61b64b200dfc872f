"""A filter that is on leaves nothing through that it should stop."""

from __future__ import annotations

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Credited


def filters(credited: Credited) -> Finding | None:
    if not credited.expected.drops_equal_rewards:
        return None
    for group in credited.kept.groups:
        rewards = group.rewards
        if len(rewards) > 1 and max(rewards) - min(rewards) <= credited.expected.tolerance:
            return found(
                "a group whose attempts all earned the same came through the filter against it",
                task=group.task_key,
                attempts=len(rewards),
                reward=rewards[0],
            )
    return None
