"""What vLLM is asked for one turn, and what its answer becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from skyfleet.chat.completion import Finish
from skyfleet.engines.sampling import SamplingParams, request_seed
from skyfleet.errors import EngineError

_FINISHES: Mapping[str | None, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


class Part(Protocol):
    """vLLM's CompletionOutput, as far as it is read."""

    token_ids: Sequence[int]
    logprobs: Any
    """vLLM's FlatLogprobs; None for a greedy turn, which has not asked for any."""
    finish_reason: str | None


def vllm_fields(sampling: SamplingParams, *, session: str, position: int) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams. Stop strings are not among them: the engine reads them."""
    seed = sampling.seed
    # The likeliest token is taken with certainty; vLLM would tell how likely it was.
    greedy = sampling.temperature == 0
    return {
        "max_tokens": sampling.max_generate_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "seed": None if seed is None else request_seed(seed, session, position),
        "ignore_eos": True,  # what ends a turn stands in stop_token_ids
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": None if greedy else 0,  # the chosen token's alone
        "flat_logprobs": True,
        "detokenize": False,
    }


def logprobs_of(part: Part) -> list[float]:
    """One a token."""
    if part.logprobs is None:
        return [0.0] * len(part.token_ids)
    logprobs: list[float] = part.logprobs.logprobs
    # With a last part that has no tokens come the logprobs of all the parts before it.
    return logprobs[len(logprobs) - len(part.token_ids) :]


def vllm_finish(part: Part) -> Finish:
    finish = _FINISHES.get(part.finish_reason)
    if finish is None:
        raise EngineError(f"vLLM ended a turn with finish_reason={part.finish_reason!r}")
    return finish
