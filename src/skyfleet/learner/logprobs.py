"""Logprobs and entropy of action tokens, computed in chunks so that full logits are never held."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skyfleet.learner.batching import MicroBatch
from skyfleet.models.decoder import Decoder
from skyfleet.models.fused.ops import head_logprobs
from skyfleet.models.packed import take_rows

_CPU_CHUNK, _CUDA_CHUNK = 1024, 4096
"""Tokens per chunk: logits that fit a CPU cache, and products large enough for a GPU."""


def default_chunk_size(*, on_gpu: bool) -> int:
    """Tokens whose logits are held at once unless `trainer.loss_chunk_size` is set."""
    return _CUDA_CHUNK if on_gpu else _CPU_CHUNK


def action_logprobs(
    decoder: Decoder,
    batch: MicroBatch,
    *,
    temperature: float,
    chunk_size: int | None = None,
    entropy_gradient: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprob with gradient, and entropy with gradient if asked, of each action token: [N], [N].

    `temperature` is that of the rollouts: the policy is the tempered distribution. `recompute`
    trades time for memory in the layers, `chunk_size` in the head.
    """
    attention = batch.attention
    hidden_TE = decoder.hidden(
        attention.token_ids_T, attention.positions_T, attention, recompute=recompute
    )
    hidden_NE = take_rows(hidden_TE, batch.before_N)
    if hidden_NE.is_cuda and decoder.has_plain_head:
        return head_logprobs(
            hidden_NE,
            decoder.head_weight,
            batch.action_N,
            temperature=temperature,
            chunk_size=chunk_size or _CUDA_CHUNK,
            entropy_gradient=entropy_gradient,
        )

    def score_chunk(hidden_CE: Tensor, tokens_C: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_CV = torch.log_softmax(decoder.logits(hidden_CE) / temperature, dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)
        return logprobs_CV.gather(1, tokens_C.unsqueeze(1)).squeeze(1), entropy_C

    size = chunk_size or _CPU_CHUNK
    chunks = list(zip(torch.split(hidden_NE, size), torch.split(batch.action_N, size), strict=True))
    if len(chunks) == 1:
        return score_chunk(*chunks[0])
    # Recomputed in the backward pass, so that the logits of one chunk exist at a time.
    parts = [checkpoint(score_chunk, h, c, use_reentrant=False) for h, c in chunks]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
