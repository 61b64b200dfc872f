"""Packing: samples -> micro-batches within a token budget, shared beginnings together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyfleet.algorithms.sample import Sample
from skyfleet.models.packed import PackedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The tensors of one forward pass. T runs over packed tokens, N over the chosen ones."""

    attention: PackedAttention
    before_N: Tensor
    """Where in T the token just before each chosen one stands: its output predicts it."""
    chosen_N: Tensor
    behaviour_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    """What each token counts in the mini-batch's loss."""
    kl_weights_N: Tensor
    """The same for the KL term, which is always a mean over sequences."""


def plan(samples: Sequence[Sample], *, max_tokens: int) -> list[list[int]]:
    """Indices per micro-batch: attempts at one task stay together, tasks of like length meet.

    No micro-batch exceeds the budget once padded to its longest member, except a sample that
    does so alone.
    """
    longest: dict[str, int] = {}
    for sample in samples:
        longest[sample.task_key] = max(longest.get(sample.task_key, 0), len(sample.token_ids))

    def place(index: int) -> tuple[int, str]:
        return -longest[samples[index].task_key], samples[index].task_key

    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(samples)), key=place):
        wider = max(width, len(samples[index].token_ids))
        if batches and wider * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
            width = wider
        else:
            batches.append([index])
            width = len(samples[index].token_ids)
    return batches


def pack(
    samples: Sequence[Sample],
    weights: Sequence[float],
    *,
    max_tokens: int,
    device: torch.device,
) -> list[MicroBatch]:
    """`weights` holds what one token of each sample counts."""
    kl_weights = [1 / (len(samples) * max(s.n_chosen, 1)) for s in samples]
    return [
        _micro_batch(
            [samples[i] for i in members],
            [weights[i] for i in members],
            [kl_weights[i] for i in members],
            device,
        )
        for members in plan(samples, max_tokens=max_tokens)
    ]


def _micro_batch(
    samples: Sequence[Sample],
    weights: Sequence[float],
    kl_weights: Sequence[float],
    device: torch.device,
) -> MicroBatch:
    attention = PackedAttention([s.token_ids for s in samples], device)
    chosen = [
        (row, at)
        for row, sample in enumerate(samples)
        for at, is_chosen in enumerate(sample.loss_mask)
        if is_chosen
    ]
    rows_N = torch.tensor([row for row, _ in chosen], device=device)
    at_N = torch.tensor([at for _, at in chosen], device=device)

    def values(of: Callable[[int, int], float]) -> Tensor:
        return torch.tensor([of(row, at) for row, at in chosen], device=device)

    return MicroBatch(
        attention=attention,
        before_N=attention.rows_BL[rows_N, at_N - 1],
        chosen_N=torch.tensor([samples[row].token_ids[at] for row, at in chosen], device=device),
        behaviour_logprobs_N=values(lambda row, at: samples[row].logprobs[at]),
        advantages_N=values(lambda row, at: samples[row].advantages[at]),
        weights_N=values(lambda row, _: weights[row]),
        kl_weights_N=values(lambda row, _: kl_weights[row]),
    )
