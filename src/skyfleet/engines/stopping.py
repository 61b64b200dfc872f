"""Stopping: whether a turn is over, asked after every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyfleet.chat.completion import Finish
from skyfleet.engines.sampling import SamplingParams


def finish_of(
    sampling: SamplingParams, sampled: Sequence[int], decode_text: Callable[[Sequence[int]], str]
) -> Finish | None:
    """How the turn ended with its last token; None: it goes on."""
    if sampled[-1] in sampling.stop_token_ids:
        return "stop"
    if sampling.stop and said_stop(sampling.stop, sampled, decode_text):
        return "stop"
    return "length" if len(sampled) >= sampling.max_generate_length else None


def said_stop(
    stops: Sequence[str],
    sampled: Sequence[int],
    decode_text: Callable[[Sequence[int]], str],
    *,
    n_new: int = 1,
) -> bool:
    """Whether a stop string ends within the last `n_new` tokens."""
    text = decode_text(sampled[-(n_new - 1 + stop_window(stops)) :])
    return any(stop in text for stop in stops)


def stop_window(stops: Sequence[str]) -> int:
    """Tokens that a stop string takes at most."""
    # A token is at least a byte; a few more, because some tokenizers strip what they decode first.
    return max(len(stop.encode()) for stop in stops) + 4
