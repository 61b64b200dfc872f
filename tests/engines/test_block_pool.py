"""The KV block pool: sharing, caching, eviction order and accounting."""

from __future__ import annotations

from random import Random

from skyfleet.engines.cuda.block_pool import KVBlockPool, pool_size
from skyfleet.engines.prefix_cache import BLOCK_SIZE, hash_blocks


def test_the_null_block_is_never_allocated() -> None:
    pool = KVBlockPool(4)
    assert sorted(pool.allocate(3) or []) == [1, 2, 3]
    assert pool.allocate(1) is None


def test_a_cached_prefix_is_acquired_up_to_its_first_gap() -> None:
    pool = KVBlockPool(10)
    blocks = pool.allocate(3) or []
    for block, block_hash in zip(blocks, (11, 12, 13), strict=True):
        pool.register(block, block_hash)
    assert pool.acquire_cached([11, 12, 99, 13]) == blocks[:2]
    assert pool.acquire_cached([99, 11]) == []


def test_released_blocks_stay_cached_and_the_end_of_a_prefix_is_evicted_first() -> None:
    pool = KVBlockPool(4)
    blocks = pool.allocate(3) or []
    for block, block_hash in zip(blocks, (1, 2, 3), strict=True):
        pool.register(block, block_hash)
    pool.release(blocks)
    assert pool.n_available == 3
    taken = pool.allocate(1) or []
    assert taken == [blocks[2]]
    assert pool.acquire_cached([1, 2, 3]) == blocks[:2]


def test_a_shared_block_is_available_when_both_holders_release_it() -> None:
    pool = KVBlockPool(3)
    (block,) = pool.allocate(1) or []
    pool.register(block, 5)
    assert pool.acquire_cached([5]) == [block]
    pool.release([block])
    assert pool.n_available == 1
    pool.release([block])
    assert pool.n_available == 2


def test_resetting_the_prefix_cache_loses_no_block() -> None:
    pool = KVBlockPool(6)
    held, idle = pool.allocate(2) or [], pool.allocate(2) or []
    for block in (*held, *idle):
        pool.register(block, 100 + block)
    pool.release(idle)
    pool.reset_prefix_cache()
    assert pool.acquire_cached([100 + idle[0]]) == []
    pool.release(held)
    assert pool.n_available == 5


def test_a_block_hash_covers_the_whole_prefix() -> None:
    one, other = list(range(40)), [9, *range(1, 40)]
    assert len(hash_blocks(one)) == 40 // BLOCK_SIZE
    assert not set(hash_blocks(one)) & set(hash_blocks(other))
    assert hash_blocks(one[:16]) + hash_blocks(one, hash_blocks(one[:16])) == hash_blocks(one)


def test_the_pool_size_is_what_is_needed_or_what_fits_plus_the_null_block() -> None:
    assert pool_size(100, 2, None) == 1 + 7  # of 16 tokens
    assert pool_size(100, 2, 5 * 32 + 31) == 1 + 5
    assert pool_size(100, 2, 1 << 20) == 1 + 7


def test_block_counts_stay_consistent_over_random_operations() -> None:
    random, pool = Random(0), KVBlockPool(30)
    holders: list[list[int]] = []
    for _ in range(10_000):
        action = random.random()
        if action < 0.4:
            block_hashs = [hash(("d", random.randrange(4), n)) for n in range(random.randrange(6))]
            known = pool.acquire_cached(block_hashs)
            fresh = pool.allocate(random.randrange(4))
            if fresh is None:
                pool.release(known)
                continue
            for block, block_hash in zip(fresh, block_hashs[len(known) :], strict=False):
                pool.register(block, block_hash)
            holders.append(known + fresh)
        elif holders and action < 0.98:
            pool.release(holders.pop(random.randrange(len(holders))))
        elif action > 0.995:
            pool.reset_prefix_cache()
        assert pool.n_available == 29 - len({block for blocks in holders for block in blocks})
