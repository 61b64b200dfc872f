"""Staleness: how many updates the policy made since it sampled what it is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from skyfleet.trajectories.trajectory import Group, Trajectory


def count_versions(episode: Trajectory) -> Counter[int]:
    """Sampled tokens by the version of the weights that sampled them."""
    counts: Counter[int] = Counter()
    for transcript in episode.transcripts:
        counts.update(transcript.count_tokens_by_version())
    return counts


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """`async/staleness_*` of the groups that weights of `version` are trained on.

    As in SkyRL per group, here from its oldest token, and also per token.
    """
    episodes = [[count_versions(t) for t in group.trajectories] for group in groups]
    # A group without a sampled token is in no mean.
    oldest = [
        version - min(version for counts in attempts for version in counts)
        for attempts in episodes
        if any(attempts)
    ]
    tokens: Counter[int] = Counter()
    n_mixed = n_episodes = 0
    for counts in (counts for attempts in episodes for counts in attempts):
        tokens.update(counts)
        n_mixed, n_episodes = n_mixed + (len(counts) > 1), n_episodes + 1
    n_tokens = tokens.total()
    return {
        "async/staleness_mean": fmean(oldest) if oldest else 0.0,
        "async/staleness_max": float(max(oldest, default=0)),
        "async/staleness_min": float(min(oldest, default=0)),
        "async/token_staleness_mean": (
            sum((version - by) * n for by, n in tokens.items()) / n_tokens if n_tokens else 0.0
        ),
        "async/mixed_version_episodes": n_mixed / n_episodes if n_episodes else 0.0,
    }
