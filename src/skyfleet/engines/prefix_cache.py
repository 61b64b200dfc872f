"""Prefix caching: chained block hashes and the longest-prefix lookup that both KV caches share.

`kv_cache.py` (CPU, one contiguous row per session) and `cuda/block_pool.py` (GPU, paged blocks)
store keys and values differently, but they identify and find a cached prefix in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

BLOCK_SIZE = 16
"""Tokens per block. Prefixes are hashed, compared and shared in whole blocks."""

HolderT = TypeVar("HolderT")


def hash_blocks(token_ids: Sequence[int], known: Sequence[int] = (), *, salt: int = 0) -> list[int]:
    """Return the hashes of all full blocks past the `known` ones, which cover the first blocks.

    Each hash includes the hash before it, so one hash identifies the whole prefix up to its block.
    Blocks with another `salt` have other hashes.
    """
    block_hash = known[-1] if known else salt
    new: list[int] = []
    for start in range(len(known) * BLOCK_SIZE, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        block_hash = hash((block_hash, *token_ids[start : start + BLOCK_SIZE]))
        new.append(block_hash)
    return new


def find_cached_prefix(block_hashes: Iterable[int], cached: Mapping[int, HolderT]) -> list[HolderT]:
    """Return what holds each block of the longest cached prefix."""
    found: list[HolderT] = []
    for block_hash in block_hashes:
        holder = cached.get(block_hash)
        if holder is None:
            break
        found.append(holder)
    return found
