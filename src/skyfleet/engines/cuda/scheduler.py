"""Requests and their admission: which sequence gets which slot and which KV blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.cuda.block_pool import PAGE, PagePool, page_digests, pages_for
from skyfleet.engines.cuda.prefill import Span
from skyfleet.engines.sampler import randomness_of
from skyfleet.engines.sampling_params import SamplingParams


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


class Seating:
    def __init__(self, *, n_slots: int, n_pages: int, table_width: int) -> None:
        self._pool = PagePool(n_pages)
        self._free_slots = list(range(n_slots))
        """A heap: the lowest goes first, for few sequences to need few slots."""
        self.table = np.zeros((n_slots, table_width), dtype=np.int32)
        """The pages of each slot, in order."""
        self.has_moved = self.has_new_pages = False
        """Somebody came, began to speak, or left; or was given pages."""
        self.resting: list[int] = []
        """Slots whose sequence ended on the host's word."""

    @property
    def n_pages(self) -> int:
        """That can be held."""
        return self._pool.n_pages

    @property
    def n_available(self) -> int:
        return self._pool.n_available

    @property
    def is_full(self) -> bool:
        return not self._free_slots

    def settle(self, request: Request) -> bool:
        """A slot and pages for the prompt, shared where others computed them; False if there is no room."""
        if self.is_full:
            return False
        pages = self._pool.hold_known(request.digests[: request.n_shareable])
        fresh = self._pool.hold_new(pages_for(len(request.token_ids)) - len(pages))
        if fresh is None:
            self._pool.let_go(pages)
            return False
        request.n_read, request.n_known = len(pages) * PAGE, len(pages)
        request.pages = pages + fresh
        request.slot = heappop(self._free_slots)
        self.table[request.slot, : len(request.pages)] = request.pages
        self.has_moved = self.has_new_pages = True
        return True

    def grow(self, request: Request, n_tokens: int) -> bool:
        """Pages for so many tokens in all; False if there are none left."""
        n_held = len(request.pages)
        n_wanted = min(pages_for(n_tokens), self.table.shape[1])
        if n_wanted <= n_held:
            return True
        fresh = self._pool.hold_new(n_wanted - n_held)
        if fresh is None:
            return False
        request.pages += fresh
        self.table[request.slot, n_held:n_wanted] = fresh
        self.has_new_pages = True
        return True

    def publish(self, request: Request) -> None:
        """Others may share every page that is full and computed."""
        request.digests = page_digests(request.token_ids, request.digests)
        n_full = min(request.n_read // PAGE, len(request.digests))
        for at in range(request.n_known, n_full):
            self._pool.know(request.pages[at], request.digests[at])
        request.n_known = max(request.n_known, n_full)

    def leave(self, request: Request) -> None:
        """What it computed stays known until its pages are needed."""
        self.publish(request)
        self._pool.let_go(request.pages)
        heappush(self._free_slots, request.slot)
        self.resting.append(request.slot)
        self.has_moved = True
        request.pages, request.slot, request.speaks = [], -1, False

    def forget_all(self) -> None:
        """The weights changed: no page is true any more."""
        self._pool.forget_all()
