"""Pages are shared, kept while idle, reused last of all, and never lost."""

from __future__ import annotations

from random import Random

from skyfleet.engines.cuda.block_pool import PAGE, KVBlockPool, hash_blocks, pool_size


def test_page_zero_is_nobodys() -> None:
    pool = KVBlockPool(4)
    assert sorted(pool.allocate(3) or []) == [1, 2, 3]
    assert pool.allocate(1) is None


def test_a_known_beginning_is_held_up_to_its_first_gap() -> None:
    pool = KVBlockPool(10)
    pages = pool.allocate(3) or []
    for page, digest in zip(pages, (11, 12, 13), strict=True):
        pool.register(page, digest)
    assert pool.acquire_cached([11, 12, 99, 13]) == pages[:2]
    assert pool.acquire_cached([99, 11]) == []


def test_an_idle_page_keeps_its_content_until_it_is_needed_ends_before_beginnings() -> None:
    pool = KVBlockPool(4)
    pages = pool.allocate(3) or []
    for page, digest in zip(pages, (1, 2, 3), strict=True):
        pool.register(page, digest)
    pool.release(pages)
    assert pool.n_available == 3
    taken = pool.allocate(1) or []
    assert taken == [pages[2]]
    assert pool.acquire_cached([1, 2, 3]) == pages[:2]


def test_a_page_that_two_hold_is_free_when_both_let_go() -> None:
    pool = KVBlockPool(3)
    (page,) = pool.allocate(1) or []
    pool.register(page, 5)
    assert pool.acquire_cached([5]) == [page]
    pool.release([page])
    assert pool.n_available == 1
    pool.release([page])
    assert pool.n_available == 2


def test_forgetting_makes_nothing_findable_and_loses_no_page() -> None:
    pool = KVBlockPool(6)
    held, idle = pool.allocate(2) or [], pool.allocate(2) or []
    for page in (*held, *idle):
        pool.register(page, 100 + page)
    pool.release(idle)
    pool.reset_prefix_cache()
    assert pool.acquire_cached([100 + idle[0]]) == []
    pool.release(held)
    assert pool.n_available == 5


def test_a_digest_stands_for_everything_before_it() -> None:
    one, other = list(range(40)), [9, *range(1, 40)]
    assert len(hash_blocks(one)) == 40 // PAGE
    assert not set(hash_blocks(one)) & set(hash_blocks(other))
    assert hash_blocks(one, hash_blocks(one[:16])) == hash_blocks(one)


def test_a_pool_holds_what_is_wanted_or_what_fits_and_one_page_of_nobodys() -> None:
    assert pool_size(100, 2, None) == 1 + 7  # of 16 tokens
    assert pool_size(100, 2, 5 * 32 + 31) == 1 + 5
    assert pool_size(100, 2, 1 << 20) == 1 + 7


def test_ten_thousand_random_deeds_leave_the_books_balanced() -> None:
    random, pool = Random(0), KVBlockPool(30)
    holders: list[list[int]] = []
    for _ in range(10_000):
        deed = random.random()
        if deed < 0.4:
            digests = [hash(("d", random.randrange(4), n)) for n in range(random.randrange(6))]
            known = pool.acquire_cached(digests)
            fresh = pool.allocate(random.randrange(4))
            if fresh is None:
                pool.release(known)
                continue
            for page, digest in zip(fresh, digests[len(known) :], strict=False):
                pool.register(page, digest)
            holders.append(known + fresh)
        elif holders and deed < 0.98:
            pool.release(holders.pop(random.randrange(len(holders))))
        elif deed > 0.995:
            pool.reset_prefix_cache()
        assert pool.n_available == 29 - len({page for pages in holders for page in pages})
