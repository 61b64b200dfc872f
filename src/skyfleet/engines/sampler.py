"""Sampler: temperature, top-k, top-p, min-p, seeds, stop conditions, request validation.

The CPU engine samples here. The CUDA engine samples in a kernel, but shares `truncation_mask`, the
random numbers and the stop conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

from skyfleet.chat.transcript import Finish
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.sampling_params import SamplingParams


def sample_tokens(
    logits_NV: Tensor, sampling: SamplingParams, uniforms_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample tokens [N]; return them with their logprobs [N] under the truncated distribution.

    One uniform number decides one token, so a sample does not depend on the rest of the batch.
    Temperature 0 takes the most likely token with probability 1, so its logprob is 0.
    """
    if sampling.temperature == 0:
        tokens_N = logits_NV.argmax(dim=-1)
        return tokens_N, torch.zeros_like(tokens_N, dtype=torch.float32)
    if sampling.temperature != 1:
        logits_NV = logits_NV / sampling.temperature
    probs_NV = torch.softmax(logits_NV, dim=-1)
    if sampling.truncates:
        probs_NV = probs_NV * truncation_mask(
            probs_NV,
            top_p_N=torch.tensor([sampling.top_p], device=probs_NV.device),
            top_k_N=torch.tensor([sampling.top_k], device=probs_NV.device),
            min_p_N=torch.tensor([sampling.min_p], device=probs_NV.device),
        )
        probs_NV /= probs_NV.sum(dim=-1, keepdim=True)
    # In float32, the cumulative sum of 150,000 small terms would drift past the last token.
    cumulative_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
    targets_N1 = uniforms_N.unsqueeze(1) * cumulative_NV[:, -1:]
    tokens_N1 = torch.searchsorted(cumulative_NV, targets_N1, right=True)
    tokens_N1 = tokens_N1.clamp(max=logits_NV.shape[-1] - 1)
    return tokens_N1.squeeze(1), probs_NV.gather(1, tokens_N1).squeeze(1).log()


def truncation_mask(
    probs_NV: Tensor, *, top_p_N: Tensor, top_k_N: Tensor, min_p_N: Tensor
) -> Tensor:
    """Tokens [N, V] that remain after min-p, top-k and top-p (nucleus) truncation, in vLLM's order.

    The parameters have one value per row, or one for all rows. It runs inside CUDA graphs, so it
    must not branch on their values.
    """
    top_p_N1, top_k_N1, min_p_N1 = (x.unsqueeze(1) for x in (top_p_N, top_k_N, min_p_N))
    probs_NV, order_NV = probs_NV.sort(dim=-1, descending=True)
    keep_NV = probs_NV >= min_p_N1 * probs_NV[:, :1]
    ranks_V = torch.arange(probs_NV.shape[-1], device=probs_NV.device)
    keep_NV &= (top_k_N1 <= 0) | (ranks_V < top_k_N1)
    remaining_NV = probs_NV * keep_NV
    remaining_NV = remaining_NV / remaining_NV.sum(dim=-1, keepdim=True)
    before_NV = remaining_NV.cumsum(dim=-1) - remaining_NV
    keep_NV &= (before_NV < top_p_N1) | (top_p_N1 >= 1)
    return torch.zeros_like(keep_NV).scatter(1, order_NV, keep_NV)


def make_rng(seed: int | None, session: str, position: int) -> np.random.Generator:
    """The same seed, session and position give the same random numbers, whatever else is in the
    batch."""
    if seed is None:
        return np.random.default_rng()
    digest = blake2b(f"{seed}|{session}|{position}".encode(), digest_size=16).digest()
    key: Any = _Key(digest)  # numpy's types name one seed sequence; its code takes any
    return np.random.Generator(np.random.Philox(key))


class _Key(ISeedSequence):
    """Half the cost of `Philox(key=...)`, which also reads entropy from the system for nothing."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return np.frombuffer(self._digest[::-1], "<u8")


def detect_finish(
    sampling: SamplingParams, sampled: Sequence[int], decode_text: Callable[[Sequence[int]], str]
) -> Finish | None:
    """Why the turn ended with its last token; None if it continues."""
    if sampled[-1] in sampling.stop_token_ids:
        return "stop"
    if sampling.stop and ends_with_stop(sampling.stop, sampled, decode_text):
        return "stop"
    return "length" if len(sampled) >= sampling.max_generate_length else None


def ends_with_stop(
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
    """Maximum number of tokens in a stop string."""
    # A token is at least one byte. A few more, because some tokenizers strip the first decoded one.
    return max(len(stop.encode()) for stop in stops) + 4


def validate_request(
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    capacity: int,
    session: str,
    vocab_size: int | None = None,
) -> None:
    """Raise `RequestRejectedError` for an empty prompt, token ids outside the vocabulary, or too many
    tokens.

    Without `vocab_size` the ids are not checked, because vLLM does that itself.
    """
    if not token_ids:
        raise RequestRejectedError(
            f"session {session}: the prompt is empty; send at least one token"
        )
    if len(token_ids) + sampling.max_generate_length > capacity:
        raise RequestRejectedError(
            f"session {session}: {len(token_ids)} prompt tokens + max_generate_length="
            f"{sampling.max_generate_length} exceed the engine's {capacity}"
        )
    if vocab_size is None:
        return
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:
            raise RequestRejectedError(
                f"session {session}: prompt token {extreme} is outside the model's vocabulary (0 to "
                f"{vocab_size - 1}); was the prompt encoded with another tokenizer?"
            )
