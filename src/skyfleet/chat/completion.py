"""Completion: the tokens an engine sampled, exactly as it sampled them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Under the distribution the tokens were drawn from: after temperature and truncation."""
    finish: Finish
    policy_version: int

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.logprobs)} logprobs")
