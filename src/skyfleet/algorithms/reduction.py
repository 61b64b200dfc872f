"""Loss reductions: the weight of each action token in the loss of a mini-batch.

Weights are computed before the mini-batch is split into micro-batches, so the loss is a plain sum
that does not depend on the split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from skyfleet.errors import ConfigError

Reduction = Callable[[Sequence[int], Sequence[str]], list[float]]
"""Action-token count and prompt of each sequence -> the weight of each of its tokens."""


def token_mean(counts: Sequence[int], prompts: Sequence[str] = ()) -> list[float]:
    """Equal weight per token. `token_mean([1, 3])` is `[0.25, 0.25]`."""
    return [1 / max(sum(counts), 1)] * len(counts)


def sequence_mean(counts: Sequence[int], prompts: Sequence[str] = ()) -> list[float]:
    """Equal weight per sequence. `sequence_mean([1, 3])` is `[1/2, 1/6]`."""
    return [1 / (len(counts) * max(count, 1)) for count in counts]


def seq_mean_token_sum_norm(
    counts: Sequence[int], prompts: Sequence[str] = (), *, max_seq_len: int
) -> list[float]:
    """Dr. GRPO (arXiv 2503.20783): divide by a constant length, so that length is not rewarded."""
    return [1 / (len(counts) * max_seq_len)] * len(counts)


def prompt_mean(counts: Sequence[int], prompts: Sequence[str]) -> list[float]:
    """Equal weight per prompt. `prompt_mean([1, 3, 4], "aab")` is `[1/8, 1/8, 1/8]`."""
    tokens: Counter[str] = Counter()
    for count, prompt in zip(counts, prompts, strict=True):
        tokens[prompt] += count
    return [1 / (len(tokens) * max(tokens[prompt], 1)) for prompt in prompts]


def token_mean_legacy(
    counts: Sequence[int], prompts: Sequence[str] = (), *, block_size: int
) -> list[float]:
    """Older SkyRL's reduction: a token mean per block of sequences, then the mean over blocks.

    With blocks of one it is `sequence_mean`, with which Fleet's runs trained. Blocks follow the
    order of the samples, not that of our micro-batches.
    """
    blocks = [counts[at : at + block_size] for at in range(0, len(counts), block_size)]
    return [1 / (max(sum(block), 1) * len(blocks)) for block in blocks for _ in block]


def build_reduction(name: str, *, max_seq_len: int | None, block_size: int = 1) -> Reduction:
    if name == "seq_mean_token_sum_norm":
        if max_seq_len is None:
            raise ConfigError(
                "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by a constant "
                "length; set trainer.algorithm.max_seq_len"
            )
        return partial(seq_mean_token_sum_norm, max_seq_len=max_seq_len)
    named: dict[str, Reduction] = {
        "token_mean": token_mean,
        "sequence_mean": sequence_mean,
        "prompt_mean": prompt_mean,
        "token_mean_legacy": partial(token_mean_legacy, block_size=block_size),
    }
    if name not in named:
        choices = sorted([*named, "seq_mean_token_sum_norm"])
        raise ConfigError(f"trainer.algorithm.loss_reduction={name!r}; choose from {choices}")
    return named[name]
