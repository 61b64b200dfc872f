"""Seating: which slot and which pages each sequence has."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from skyfleet.engines.cuda.pages import PAGE, PagePool, page_digests, pages_for
from skyfleet.engines.cuda.request import Request


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
