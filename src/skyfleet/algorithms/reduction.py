"""Reduction: how much each chosen token weighs in the loss of a whole mini-batch.

Weights are fixed before the mini-batch is cut into micro-batches, so the loss is a plain sum and
does not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyfleet.errors import ConfigError

Reduction = Callable[[Sequence[int]], list[float]]
"""Chosen tokens per sequence -> the weight of one token, per sequence."""


def token_mean(counts: Sequence[int]) -> list[float]:
    """Every token alike. `token_mean([1, 3])` is `[0.25, 0.25]`."""
    return [1 / max(sum(counts), 1)] * len(counts)


def sequence_mean(counts: Sequence[int]) -> list[float]:
    """Every sequence alike. `sequence_mean([1, 3])` is `[1/2, 1/6]`."""
    return [1 / (len(counts) * max(count, 1)) for count in counts]


def seq_mean_token_sum_norm(counts: Sequence[int], *, max_seq_len: int) -> list[float]:
    """Dr. GRPO (arXiv 2503.20783): a constant length in the denominator, so length is not rewarded."""
    return [1 / (len(counts) * max_seq_len)] * len(counts)


def reduction(name: str, *, max_seq_len: int | None) -> Reduction:
    if name == "token_mean":
        return token_mean
    if name == "sequence_mean":
        return sequence_mean
    if name == "seq_mean_token_sum_norm":
        if max_seq_len is None:
            raise ConfigError(
                "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by a constant "
                "length: set trainer.algorithm.max_seq_len"
            )
        length = max_seq_len
        return lambda counts: seq_mean_token_sum_norm(counts, max_seq_len=length)
    choices = ["seq_mean_token_sum_norm", "sequence_mean", "token_mean"]
    raise ConfigError(f"trainer.algorithm.loss_reduction={name!r}; choose from {choices}")
