"""Stopping: whether a turn has said one of its stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def said_stop(
    stops: Sequence[str], sampled: Sequence[int], decode_text: Callable[[Sequence[int]], str]
) -> bool:
    """Whether the last token completed one of `stops`; asked after every token."""
    # A token is at least a byte, so a stop string of n bytes ends within the last n tokens.
    n_bytes = max(len(stop.encode()) for stop in stops)
    # A few more, because some tokenizers strip what they decode first.
    text = decode_text(sampled[-(n_bytes + 4) :])
    return any(stop in text for stop in stops)
