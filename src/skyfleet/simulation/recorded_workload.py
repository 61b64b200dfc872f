"""Record a workload: the episodes of a run as they were played, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from skyfleet.simulation.workload import Workload
from skyfleet.trajectories.trajectory import Group


def record_workload(groups: Sequence[Group]) -> Workload:
    """The episodes as they were played, in tokens."""
    episodes = [
        turns
        for group in groups
        for trajectory in group.trajectories
        for transcript in trajectory.transcripts
        if (turns := split_turns(transcript.loss_mask[:]))
    ]
    mixed = [len({t.reward for t in group.trajectories}) > 1 for group in groups]
    return Workload(
        source=f"{len(episodes)} episodes that were played to measure it",
        recorded=episodes,
        trained_share=max(0.01, fmean(mixed)),
    )


def split_turns(loss_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Per turn the tokens before it and those sampled in it; what follows the last one is left out."""
    runs = [(sampled, len(list(run))) for sampled, run in groupby(loss_mask)]
    return [
        (before, sampled)
        for (_, before), (is_sampled, sampled) in zip(runs[::2], runs[1::2], strict=False)
        if is_sampled
    ]
