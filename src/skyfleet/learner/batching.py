"""Mini-batches and packed micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, pairwise
from math import ceil

import numpy as np
import torch
from torch import Tensor

from skyfleet.algorithms.losses.loss import LossInputs
from skyfleet.algorithms.sample import Sample
from skyfleet.models.packed import PackedAttention


def mini_batches(samples: Sequence[Sample], prompts: int) -> list[list[Sample]]:
    """Runs of at most `prompts` tasks, every sample of a task in one; no run is much shorter.

    A filter may leave 33 tasks: `[11, 11, 11]` and not `[16, 16, 1]`, where one task would move the
    policy as far as sixteen.
    """
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task_key, []).append(sample)
    groups, n_runs = list(by_task.values()), ceil(len(by_task) / prompts)
    ends = [ceil(len(groups) * run / n_runs) for run in range(1, n_runs + 1)]
    return [
        [sample for group in groups[start:end] for sample in group]
        for start, end in pairwise([0, *ends])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The tensors of one forward pass. T runs over packed tokens, N over the chosen ones."""

    members: tuple[int, ...]
    """Which samples, in the order of N."""
    attention: PackedAttention
    before_N: Tensor
    """Where in T the token just before each chosen one stands: its output predicts it."""
    chosen_N: Tensor
    lengths_B: Tensor
    """How many of N are each member's."""
    behaviour_logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    """What each token counts in the mini-batch's loss."""
    kl_weights_N: Tensor
    """The same for the KL term, which is always a mean over sequences."""

    def inputs(self, logprobs_N: Tensor, selected_N: Tensor | None = None) -> LossInputs:
        """What the loss is given of it."""
        return LossInputs(
            tokens_T=self.chosen_N,
            logprobs_T=logprobs_N,
            old_logprobs_T=self.old_logprobs_N,
            behaviour_logprobs_T=self.behaviour_logprobs_N,
            advantages_T=self.advantages_N,
            lengths_B=self.lengths_B,
            selected_T=selected_N,
        )


def plan(samples: Sequence[Sample], *, max_tokens: int, evenly: bool = True) -> list[list[int]]:
    """Indices per micro-batch: attempts at one task stay together, tasks of like length meet.

    No micro-batch exceeds the budget once padded to its longest member, except a sample that
    does so alone. `evenly`, 33 like samples at a budget of 16 are 11, 11 and 11; without, each
    is filled before the next is begun.
    """
    longest: dict[str, int] = {}
    for sample in samples:
        longest[sample.task_key] = max(longest.get(sample.task_key, 0), len(sample.token_ids))

    def place(index: int) -> tuple[int, str]:
        return -longest[samples[index].task_key], samples[index].task_key

    lengths = {i: len(samples[i].token_ids) for i in sorted(range(len(samples)), key=place)}
    full = _filled(lengths, max_tokens)
    if not evenly or len(full) < 2:
        return full

    def pieces(batches: list[list[int]]) -> int:
        return sum(len({samples[i].task_key for i in batch}) for batch in batches)

    def heaviest(batches: list[list[int]]) -> int:
        return max(len(batch) * max(lengths[i] for i in batch) for batch in batches)

    # Two micro-batches half as full would have been one, so no smaller budget needs a trial.
    smaller = [_filled(lengths, max_tokens * share // 64) for share in range(63, 31, -1)]
    # Not at the price of another pass, nor of a task's shared beginning read once more.
    as_good = [b for b in smaller if len(b) == len(full) and pieces(b) <= pieces(full)]
    return min([full, *as_good], key=heaviest)


def _filled(lengths: Mapping[int, int], max_tokens: int) -> list[list[int]]:
    """In this order, each micro-batch takes what the budget allows."""
    batches: list[list[int]] = []
    width = 0
    for index, length in lengths.items():
        wider = max(width, length)
        if batches and wider * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
            width = wider
        else:
            batches.append([index])
            width = length
    return batches


def pack(
    samples: Sequence[Sample],
    weights: Sequence[float],
    *,
    max_tokens: int,
    device: torch.device,
) -> list[MicroBatch]:
    """`weights` holds what one token of each sample counts."""
    kl_weights = [1 / (len(samples) * max(s.n_action_tokens, 1)) for s in samples]
    return [
        _micro_batch(
            tuple(members),
            [samples[i] for i in members],
            [weights[i] for i in members],
            [kl_weights[i] for i in members],
            device,
        )
        # A CPU takes as long for one cut as for another: its sums keep the order they had.
        for members in plan(samples, max_tokens=max_tokens, evenly=device.type != "cpu")
    ]


def in_sample_order(
    parts: Sequence[LossInputs], members: Sequence[tuple[int, ...]]
) -> tuple[LossInputs, Tensor]:
    """Micro-batches as one, the same however they were cut; and where each token was before."""
    lengths_B = torch.cat([part.lengths_B for part in parts])
    owners_B = torch.tensor([i for batch in members for i in batch], device=lengths_B.device)
    order_N = torch.argsort(owners_B.repeat_interleave(lengths_B), stable=True)
    whole = LossInputs(
        tokens_T=torch.cat([part.tokens_T for part in parts])[order_N],
        logprobs_T=torch.cat([part.logprobs_T for part in parts])[order_N],
        old_logprobs_T=torch.cat([part.old_logprobs_T for part in parts])[order_N],
        behaviour_logprobs_T=torch.cat([part.behaviour_logprobs_T for part in parts])[order_N],
        advantages_T=torch.cat([part.advantages_T for part in parts])[order_N],
        lengths_B=lengths_B[torch.argsort(owners_B)],
    )
    return whole, order_N


def _micro_batch(
    members: tuple[int, ...],
    samples: Sequence[Sample],
    weights: Sequence[float],
    kl_weights: Sequence[float],
    device: torch.device,
) -> MicroBatch:
    attention = PackedAttention([s.token_ids for s in samples], device)
    masks, counts = [s.loss_mask for s in samples], [s.n_action_tokens for s in samples]

    def chosen(values: Iterable[Sequence[float]], dtype: type) -> Tensor:
        """Of one sequence of values a sample, those at chosen tokens."""
        each = chain.from_iterable(map(compress, values, masks))
        return torch.from_numpy(np.fromiter(each, dtype, sum(counts))).to(device)

    def repeated(values: Sequence[float], dtype: type) -> Tensor:
        """One value a sample, for each of its chosen tokens."""
        return torch.from_numpy(np.repeat(np.asarray(values, dtype), counts)).to(device)

    rows_N = repeated(range(len(samples)), np.int64)
    at_N = chosen((range(len(s.token_ids)) for s in samples), np.int64)
    behaviour_N = chosen((s.logprobs for s in samples), np.float32)
    old_N = behaviour_N
    if any(s.old_logprobs for s in samples):
        old_N = chosen((s.old_logprobs or s.logprobs for s in samples), np.float32)
    return MicroBatch(
        members=members,
        attention=attention,
        before_N=attention.rows_BL[rows_N, at_N - 1],
        chosen_N=chosen((s.token_ids for s in samples), np.int64),
        lengths_B=torch.from_numpy(np.asarray(counts, np.int64)).to(device),
        behaviour_logprobs_N=behaviour_N,
        old_logprobs_N=old_N,
        advantages_N=chosen((s.advantages for s in samples), np.float32),
        weights_N=repeated(weights, np.float32),
        kl_weights_N=repeated(kl_weights, np.float32),
    )
