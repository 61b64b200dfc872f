"""KV block pool: allocation, reference counts and prefix caching of paged KV blocks.

A block that no sequence holds keeps its content until the pool reuses it. The next turn of an
episode, or the next attempt at a task, then finds its prefix already computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from skyfleet.engines.prefix_cache import BLOCK_SIZE, find_cached_prefix


class KVBlockPool:
    def __init__(self, n_blocks: int) -> None:
        # Block 0 is the null block: inactive slots write there.
        self.n_blocks = n_blocks - 1
        """Blocks that sequences can hold."""
        self._free = list(range(n_blocks - 1, 0, -1))
        self._ref_counts = [0] * n_blocks
        self._hash_by_block: dict[int, int] = {}
        """Block -> hash of the whole prefix up to the block's end."""
        self._cached: dict[int, int] = {}
        """Hash -> block."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that no sequence holds, least recently used first."""

    @property
    def n_available(self) -> int:
        return len(self._free) + len(self._evictable)

    def acquire_cached(self, block_hashes: Iterable[int]) -> list[int]:
        """Take a reference on the blocks of the longest cached prefix."""
        blocks = find_cached_prefix(block_hashes, self._cached)
        for block in blocks:
            self._evictable.pop(block, None)
            self._ref_counts[block] += 1
        return blocks

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` blocks without content, evicting cached ones if needed.

        None if too few are left.
        """
        if n > self.n_available:
            return None
        blocks: list[int] = []
        for _ in range(n):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                del self._cached[self._hash_by_block.pop(block)]
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        # Last block first: fewer sequences share the end of a prompt, so it is evicted first.
        for block in reversed(list(blocks)):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block in self._hash_by_block:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def register(self, block: int, block_hash: int) -> None:
        """Make a computed block available to later requests."""
        if block_hash not in self._cached and block not in self._hash_by_block:
            self._cached[block_hash], self._hash_by_block[block] = block, block_hash

    def reset_prefix_cache(self) -> None:
        """Drop all cached content, because the weights changed; held blocks stay held."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._cached.clear()
        self._hash_by_block.clear()


def n_blocks_for(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK_SIZE)


def pool_size(n_tokens: int, token_bytes: int, memory_bytes: int | None) -> int:
    """Blocks for `n_tokens`, or as many as fit in `memory_bytes`; plus the null block."""
    wanted = n_blocks_for(n_tokens)
    fitting = wanted if memory_bytes is None else memory_bytes // (token_bytes * BLOCK_SIZE)
    return 1 + min(wanted, fitting)
