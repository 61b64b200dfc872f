"""Hearing: what a sequence said in a round, up to where its turn ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyfleet.chat.completion import Finish
from skyfleet.engines.cuda.request import Request
from skyfleet.engines.stopping import finish_of, said_stop, stop_window


def hear(
    request: Request,
    tokens_K: Sequence[int],
    logprobs_K: Sequence[float],
    decode_text: Callable[[Sequence[int]], str],
) -> Finish | None:
    """Gives a request its slot's tokens of a round; how its turn ended, or None if it goes on.

    Strings are for the host to find; of what the device knows only the last token can end.
    """
    # The first place is for those who began in this round, and silence comes last.
    start = 0 if tokens_K[0] >= 0 else 1
    stop = len(tokens_K) - tokens_K[start:].count(-1)
    tokens, logprobs = tokens_K[start:stop], logprobs_K[start:stop]
    stops = request.sampling.stop
    last = [*request.sampled[-stop_window(stops) :], *tokens] if stops else []
    has_stop = stops and said_stop(stops, last, decode_text, n_new=len(tokens))
    # With a string among them, after every token; without, once.
    stride = 1 if has_stop else max(len(tokens), 1)
    for at in range(0, len(tokens), stride):
        request.say(tokens[at : at + stride], logprobs[at : at + stride])
        if finish := finish_of(request.sampling, request.sampled, decode_text):
            return finish
    return None
