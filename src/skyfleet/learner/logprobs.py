"""Logprobs and entropy of the chosen tokens, without ever holding a batch's full logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skyfleet.learner.packing import MicroBatch
from skyfleet.models.decoder import Decoder
from skyfleet.models.packed import take_rows


def chosen_logprobs(
    decoder: Decoder,
    batch: MicroBatch,
    *,
    temperature: float,
    chunk_size: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprob (with gradient) and entropy (with one if asked) of each chosen token [N], [N].

    `temperature` is the one the tokens were sampled at: the policy is the tempered distribution.
    """
    attention = batch.attention
    hidden_TE = decoder.hidden(attention.token_ids_T, attention.positions_T, attention)
    hidden_NE = take_rows(hidden_TE, batch.before_N)

    def scored(hidden_CE: Tensor, chosen_C: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_CV = torch.log_softmax(decoder.logits(hidden_CE) / temperature, dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)
        return logprobs_CV.gather(1, chosen_C.unsqueeze(1)).squeeze(1), entropy_C

    chunks = list(
        zip(
            torch.split(hidden_NE, chunk_size), torch.split(batch.chosen_N, chunk_size), strict=True
        )
    )
    if len(chunks) == 1:
        return scored(*chunks[0])
    # Recomputed in the backward pass: one chunk's logits exist at a time.
    parts = [checkpoint(scored, h, c, use_reentrant=False) for h, c in chunks]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
