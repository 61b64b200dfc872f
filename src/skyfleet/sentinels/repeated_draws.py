"""Attempts at one task are drawn independently of each other."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Played

UNLIKELY = -25.0
"""Logprob of words that nobody says twice by chance."""


ENOUGH = 32
"""Tokens: a longer opening would say the same."""


def repeated_draws(played: Played) -> Finding | None:
    """Two attempts opened with the same words, which had next to no chance of being said twice."""
    opened: set[tuple[str, Sequence[int]]] = set()
    for speech in played.speeches:
        if not speech.heard:
            continue
        said = speech.heard[0].completion
        opening = (speech.trajectory.task_key, said.token_ids[:ENOUGH])
        if opening in opened and (chance := sum(said.logprobs[:ENOUGH])) < UNLIKELY:
            return found(
                "two attempts at one task drew the same unlikely words; they share their seed",
                task=opening[0],
                tokens=len(opening[1]),
                logprob=chance,
            )
        opened.add(opening)
    return None
