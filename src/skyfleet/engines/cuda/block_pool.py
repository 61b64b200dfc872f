"""Pages: who holds which page of keys and values, and which pages begin alike.

A page that nobody holds keeps its content until it is needed for something else, so the next turn
of an episode, or the next attempt at a task, finds its beginning computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

PAGE = 16
"""Tokens."""


class PagePool:
    def __init__(self, n_pages: int) -> None:
        # Page 0 is nobody's: slots that rest write there.
        self.n_pages = n_pages - 1
        """That can be held."""
        self._free = list(range(n_pages - 1, 0, -1))
        self._holders = [0] * n_pages
        self._digest: dict[int, int] = {}
        """Page -> what it was computed from, as a digest of everything up to its end."""
        self._known: dict[int, int] = {}
        """Digest -> page."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages of known content that nobody holds, longest idle first."""

    @property
    def n_available(self) -> int:
        return len(self._free) + len(self._idle)

    def hold_known(self, digests: Iterable[int]) -> list[int]:
        """The pages of the longest known beginning, held from now on."""
        held: list[int] = []
        for digest in digests:
            page = self._known.get(digest)
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            held.append(page)
        return held

    def hold_new(self, n: int) -> list[int] | None:
        """`n` pages of nobody's content; None if there are not so many."""
        if n > self.n_available:
            return None
        taken: list[int] = []
        for _ in range(n):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def let_go(self, pages: Iterable[int]) -> None:
        # Last page first: an end is of use to fewer than its beginning, and is the first to go.
        for page in reversed(list(pages)):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._digest:
                self._idle[page] = None
            else:
                self._free.append(page)

    def know(self, page: int, digest: int) -> None:
        """The page now holds what `digest` stands for."""
        if digest not in self._known and page not in self._digest:
            self._known[digest], self._digest[page] = page, digest

    def forget_all(self) -> None:
        """The weights changed: no page is true any more; those held stay held."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._known.clear()
        self._digest.clear()

    def _forget(self, page: int) -> None:
        del self._known[self._digest.pop(page)]


def page_digests(token_ids: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """Digests of all full pages; `known` are those of the first pages, computed before."""
    digests = list(known)
    digest = digests[-1] if digests else 0
    for start in range(len(digests) * PAGE, len(token_ids) - PAGE + 1, PAGE):
        digest = hash((digest, *token_ids[start : start + PAGE]))
        digests.append(digest)
    return digests


def pages_for(n_tokens: int) -> int:
    return -(-n_tokens // PAGE)


def pool_size(n_tokens: int, token_bytes: int, memory_bytes: int | None) -> int:
    """Pages for so many tokens, or as many as the memory holds; one more, which is nobody's."""
    wanted = pages_for(n_tokens)
    held = wanted if memory_bytes is None else memory_bytes // (token_bytes * PAGE)
    return 1 + min(wanted, held)
