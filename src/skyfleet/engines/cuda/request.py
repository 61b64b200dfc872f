"""Request: one turn that is being sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from skyfleet.chat.completion import Completion, Finish
from skyfleet.engines.cuda.pages import PAGE
from skyfleet.engines.cuda.reading import Span
from skyfleet.engines.drawing import randomness_of
from skyfleet.engines.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    session: str
    token_ids: list[int]
    """The prompt, then what was sampled."""
    sampling: SamplingParams
    future: asyncio.Future[Completion]
    n_prompt: int
    policy_version: int
    """When it began: weights may arrive while it runs, and the oldest decides how stale it is."""
    digests: list[int]
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    n_read: int = 0
    """Tokens whose keys and values are in its pages."""
    n_known: int = 0
    """Pages that others can find."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    speaks: bool = False
    """Its prompt has been read."""

    @property
    def uniforms(self) -> np.ndarray:
        """One number decides one token."""
        randomness = randomness_of(self.sampling.seed, self.session, self.n_prompt)
        return randomness.random(self.sampling.max_generate_length)

    @property
    def n_left(self) -> int:
        """Tokens it may still say."""
        return self.sampling.max_generate_length - len(self.logprobs)

    def n_tokens_after(self, steps: int) -> int:
        """And one that is placed; no more than it was let in for, or it might not fit even alone."""
        return len(self.token_ids) + 1 + min(steps, self.n_left)

    @property
    def n_shareable(self) -> int:
        """Pages that may be another's: one token is always left to compute, to predict the next."""
        return (len(self.token_ids) - 1) // PAGE

    @property
    def beginning(self) -> int:
        """What it can share with siblings; unlike anyone's where that is nothing."""
        return self.digests[self.n_shareable - 1] if self.n_shareable else id(self)

    def say(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.token_ids += tokens
        self.sampled += tokens
        self.logprobs += logprobs

    def completion(self, finish: Finish) -> Completion:
        return Completion(
            token_ids=tuple(self.sampled),
            logprobs=tuple(self.logprobs),
            finish=finish,
            policy_version=self.policy_version,
        )

    def span(self, stop: int, table: np.ndarray) -> Span:
        """What is to be read up to `stop`; `table` has the pages of every slot."""
        return Span(
            token_ids=self.token_ids[self.n_read : stop],
            pages=table[self.slot, : len(self.pages)],
            start=self.n_read,
            stop=stop,
        )
