"""SamplingParams: how the next token is sampled, and when a turn ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class LogitsProcessor(Protocol):
    def __call__(self, token_ids: Sequence[int], logits_V: Tensor) -> Tensor:
        """The logits to sample from, after the prompt and the tokens sampled so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_generate_length: int = 1024
    """Tokens per turn."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the turn; they stay in the output."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Seed and session determine every sampled token; None samples at random."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Called in order before each token is sampled; only the CPU engine has them."""

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p excludes tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def request_seed(seed: int, session: str, position: int) -> int:
    """The seed to send to a server, which samples by the seed alone.

    It includes the session, because all attempts at a task would otherwise be equal.
    """
    digest = blake2b(f"{seed}|{session}|{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
