"""Mini-batches per optimizer step, packed micro-batches per forward pass, and their logprobs.

Logprobs and entropy of action tokens are computed in chunks, so that full logits are never held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, pairwise
from math import ceil

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from skyfleet.algorithms.losses.loss import LossInputs
from skyfleet.algorithms.sample import Sample
from skyfleet.learner.ranks import ONE_RANK, Ranks
from skyfleet.models.decoder import Decoder
from skyfleet.models.fused.ops import head_logprobs
from skyfleet.models.packed import PackedAttention, take_rows

_CPU_CHUNK, _CUDA_CHUNK = 1024, 4096
"""Tokens per chunk: logits that fit a CPU cache, and products large enough for a GPU."""


def mini_batches(samples: Sequence[Sample], prompts: int) -> list[list[Sample]]:
    """Split into mini-batches of at most `prompts` tasks and nearly equal size.

    All samples of a task are in one mini-batch. A filter may leave 33 tasks: they become
    `[11, 11, 11]`, not `[16, 16, 1]`, where one task would move the policy as far as sixteen.
    """
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task_key, []).append(sample)
    groups, n_batches = list(by_task.values()), ceil(len(by_task) / prompts)
    ends = [ceil(len(groups) * number / n_batches) for number in range(1, n_batches + 1)]
    return [
        [sample for group in groups[start:end] for sample in group]
        for start, end in pairwise([0, *ends])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The tensors of one forward pass. T is over packed tokens, N over action tokens."""

    members: tuple[int, ...]
    """Indices of its samples, in the order of N."""
    attention: PackedAttention
    before_N: Tensor
    """Index in T of the token before each action token: its output predicts the action token."""
    action_N: Tensor
    """Ids of the action tokens."""
    lengths_B: Tensor
    """Action tokens per sample."""
    behaviour_logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    """Weight of each token in the loss of the mini-batch."""
    kl_weights_N: Tensor
    """Weight of each token in the KL term, which is always a mean over sequences."""

    def loss_inputs(self, logprobs_N: Tensor, selected_N: Tensor | None = None) -> LossInputs:
        return LossInputs(
            tokens_T=self.action_N,
            logprobs_T=logprobs_N,
            old_logprobs_T=self.old_logprobs_N,
            behaviour_logprobs_T=self.behaviour_logprobs_N,
            advantages_T=self.advantages_N,
            lengths_B=self.lengths_B,
            selected_T=selected_N,
        )


def plan(samples: Sequence[Sample], *, max_tokens: int, evenly: bool = True) -> list[list[int]]:
    """Sample indices per micro-batch: by task, with tasks of similar length together.

    Padded to its longest member, no micro-batch exceeds `max_tokens`, except a single sample that
    does. With `evenly`, 33 equal samples at a budget of 16 become 11, 11 and 11; without, each
    micro-batch is filled before the next one starts.
    """
    longest: dict[str, int] = {}
    for sample in samples:
        longest[sample.task_key] = max(longest.get(sample.task_key, 0), len(sample.token_ids))

    def sort_key(index: int) -> tuple[int, str]:
        return -longest[samples[index].task_key], samples[index].task_key

    lengths = {i: len(samples[i].token_ids) for i in sorted(range(len(samples)), key=sort_key)}
    full = _fill(lengths, max_tokens)
    if not evenly or len(full) < 2:
        return full

    def count_task_parts(batches: list[list[int]]) -> int:
        return sum(len({samples[i].task_key for i in batch}) for batch in batches)

    def largest(batches: list[list[int]]) -> int:
        return max(len(batch) * max(lengths[i] for i in batch) for batch in batches)

    # With half the budget there would be more micro-batches, so only larger budgets are tried.
    smaller = [_fill(lengths, max_tokens * share // 64) for share in range(63, 31, -1)]
    # Neither one more forward pass nor one more pass over a task's shared prompt is worth it.
    as_good = [
        b for b in smaller if len(b) == len(full) and count_task_parts(b) <= count_task_parts(full)
    ]
    return min([full, *as_good], key=largest)


def _fill(lengths: Mapping[int, int], max_tokens: int) -> list[list[int]]:
    """Fill micro-batches up to the budget, in the given order."""
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
    ranks: Ranks = ONE_RANK,
) -> list[MicroBatch]:
    """Pack this rank's share of the samples into micro-batches, as many as every other rank.

    `weights` holds the weight of a token of each sample.
    """
    kl_weights = [1 / (len(samples) * max(s.n_action_tokens, 1)) for s in samples]
    share = ranks.share(samples)
    own = [samples[i] for i in share]
    # Even sizes do not help a CPU, where filling in order keeps the order of sums.
    planned = plan(own, max_tokens=max_tokens, evenly=device.type != "cpu") if own else []
    batches = [
        _micro_batch(
            tuple(share[i] for i in members),
            [own[i] for i in members],
            [weights[share[i]] for i in members],
            [kl_weights[share[i]] for i in members],
            device,
        )
        for members in planned
    ]
    n_empty = ranks.largest(len(batches)) - len(batches)
    return [*batches, *(_empty_micro_batch(samples, device) for _ in range(n_empty))]


def _empty_micro_batch(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """No action tokens: a rank that has finished still takes part in gathering every layer."""
    shortest = min(samples, key=lambda sample: len(sample.token_ids))
    unmasked = replace(shortest, loss_mask=(False,) * len(shortest.token_ids))
    batch = _micro_batch((0,), [unmasked], [0.0], [0.0], device)
    return replace(batch, members=(), lengths_B=batch.lengths_B[:0])


def sort_by_sample(
    parts: Sequence[LossInputs], members: Sequence[tuple[int, ...]]
) -> tuple[LossInputs, Tensor]:
    """Join micro-batches in the order of samples; also returns the index each token had before."""
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

    def select(values: Iterable[Sequence[float]], dtype: type) -> Tensor:
        """Of one sequence of values per sample, those of action tokens."""
        each = chain.from_iterable(map(compress, values, masks))
        return torch.from_numpy(np.fromiter(each, dtype, sum(counts))).to(device)

    def repeat(values: Sequence[float], dtype: type) -> Tensor:
        """One value per sample, for each of its action tokens."""
        return torch.from_numpy(np.repeat(np.asarray(values, dtype), counts)).to(device)

    rows_N = repeat(range(len(samples)), np.int64)
    at_N = select((range(len(s.token_ids)) for s in samples), np.int64)
    behaviour_N = select((s.logprobs for s in samples), np.float32)
    old_N = behaviour_N
    if any(s.old_logprobs for s in samples):
        old_N = select((s.old_logprobs or s.logprobs for s in samples), np.float32)
    return MicroBatch(
        members=members,
        attention=attention,
        before_N=attention.rows_BL[rows_N, at_N - 1],
        action_N=select((s.token_ids for s in samples), np.int64),
        lengths_B=torch.from_numpy(np.asarray(counts, np.int64)).to(device),
        behaviour_logprobs_N=behaviour_N,
        old_logprobs_N=old_N,
        advantages_N=select((s.advantages for s in samples), np.float32),
        weights_N=repeat(weights, np.float32),
        kl_weights_N=repeat(kl_weights, np.float32),
    )


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
    return decoder.call(
        lambda: _action_logprobs(
            decoder, batch, temperature, chunk_size, entropy_gradient, recompute
        )
    )


def _action_logprobs(
    decoder: Decoder,
    batch: MicroBatch,
    temperature: float,
    chunk_size: int | None,
    entropy_gradient: bool,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    attention = batch.attention
    hidden_TE = decoder.hidden(
        attention.token_ids_T, attention.positions_T, attention, recompute=recompute
    )
    hidden_NE, action_N = take_rows(hidden_TE, batch.before_N), batch.action_N
    sequence, n_actions = decoder.sequence, len(action_N)
    if sequence is not None:
        hidden_NE, action_N = sequence.keep(hidden_NE), sequence.keep(action_N)
    logprobs_N, entropy_N = _score(
        decoder, hidden_NE, action_N, temperature, chunk_size, entropy_gradient
    )
    if sequence is not None:
        logprobs_N = sequence.join(logprobs_N, n_actions)
        entropy_N = sequence.join(entropy_N, n_actions)
    return logprobs_N, entropy_N


def _score(
    decoder: Decoder,
    hidden_NE: Tensor,
    action_N: Tensor,
    temperature: float,
    chunk_size: int | None,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    if decoder.has_plain_head and not len(action_N):
        # Every rank has a gradient of the head, or their reductions would differ in size.
        empty_N = linear(hidden_NE, decoder.head_weight).sum(dim=-1).float()
        return empty_N, empty_N.detach()
    if hidden_NE.is_cuda and decoder.has_plain_head:
        return head_logprobs(
            hidden_NE,
            decoder.head_weight,
            action_N,
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
    chunks = list(zip(torch.split(hidden_NE, size), torch.split(action_N, size), strict=True))
    if len(chunks) == 1:
        return score_chunk(*chunks[0])
    # Recomputed in the backward pass, so that the logits of one chunk exist at a time.
    parts = [checkpoint(score_chunk, h, c, use_reentrant=False) for h, c in chunks]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
