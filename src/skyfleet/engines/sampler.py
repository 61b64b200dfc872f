"""Sampling on the CPU: temperature, top-k, top-p, min-p, seeds, stop conditions and request validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

from skyfleet.chat.transcript import Finish
from skyfleet.engines.http_client import RefusedError
from skyfleet.engines.sampling_params import SamplingParams


def draw(logits_NV: Tensor, sampling: SamplingParams, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [N] and their logprobs [N] under the distribution actually sampled from.

    One uniform number decides one token, so a draw does not depend on its neighbours in the
    batch. Temperature 0 takes the likeliest token, with certainty: its logprob is 0.
    """
    if sampling.temperature == 0:
        tokens_N = logits_NV.argmax(dim=-1)
        return tokens_N, torch.zeros_like(tokens_N, dtype=torch.float32)
    if sampling.temperature != 1:
        logits_NV = logits_NV / sampling.temperature
    probs_NV = torch.softmax(logits_NV, dim=-1)
    if sampling.truncates:
        probs_NV = probs_NV * _kept(probs_NV, sampling)
        probs_NV /= probs_NV.sum(dim=-1, keepdim=True)
    # The cumulative sum runs in double: in single, 150,000 tiny terms drift past the last token.
    cumulative_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
    targets_N1 = uniforms_N.unsqueeze(1) * cumulative_NV[:, -1:]
    tokens_N1 = torch.searchsorted(cumulative_NV, targets_N1, right=True)
    tokens_N1 = tokens_N1.clamp(max=logits_NV.shape[-1] - 1)
    return tokens_N1.squeeze(1), probs_NV.gather(1, tokens_N1).squeeze(1).log()


def _kept(probs_NV: Tensor, sampling: SamplingParams) -> Tensor:
    """Which tokens survive min-p, then top-k, then top-p among those left: vLLM's order."""
    probs_NV, order_NV = probs_NV.sort(dim=-1, descending=True)
    keep_NV = probs_NV >= sampling.min_p * probs_NV[:, :1]
    if sampling.top_k > 0:
        keep_NV[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        probs_NV = probs_NV * keep_NV
        probs_NV = probs_NV / probs_NV.sum(dim=-1, keepdim=True)
        before_NV = probs_NV.cumsum(dim=-1) - probs_NV
        keep_NV &= before_NV < sampling.top_p
    return torch.zeros_like(keep_NV).scatter(1, order_NV, keep_NV)


def randomness_of(seed: int | None, session: str, position: int) -> np.random.Generator:
    """The same seed, session and position draw the same tokens, whatever else is in the batch."""
    if seed is None:
        return np.random.default_rng()
    digest = blake2b(f"{seed}|{session}|{position}".encode(), digest_size=16).digest()
    key: Any = _Key(digest)  # numpy's types name one kind of seed sequence, its code takes any
    return np.random.Generator(np.random.Philox(key))


class _Key(ISeedSequence):
    """`Philox(key=...)` at half its cost: that one asks the system for randomness, to no end."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return np.frombuffer(self._digest[::-1], "<u8")


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


def check_fits(
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    capacity: int,
    session: str,
    vocab_size: int | None = None,
) -> None:
    """RefusedError unless there is a prompt, of the vocabulary, and room for it with its turn.

    Without `vocab_size` the ids are not looked at: vLLM does that itself.
    """
    if not token_ids:
        raise RefusedError(f"session {session}: an empty prompt has nothing to continue")
    if len(token_ids) + sampling.max_generate_length > capacity:
        raise RefusedError(
            f"session {session}: {len(token_ids)} prompt tokens + max_generate_length="
            f"{sampling.max_generate_length} exceed the engine's {capacity}"
        )
    if vocab_size is None:
        return
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:
            raise RefusedError(
                f"session {session}: the prompt holds token {extreme}, and the model's are 0 to "
                f"{vocab_size - 1}; was it written with another tokenizer?"
            )
