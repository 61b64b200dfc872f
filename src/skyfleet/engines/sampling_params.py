"""SamplingParams: how the next token is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_generate_length: int = 1024
    """Tokens a turn."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the turn; kept in the output."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Together with the session it decides every draw; None draws afresh."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn at all."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def request_seed(seed: int, session: str, position: int) -> int:
    """A server draws by the seed alone: without the session all attempts would be the same."""
    digest = blake2b(f"{seed}|{session}|{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
