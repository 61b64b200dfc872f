"""Pages are shared, kept while idle, reused last of all, and never lost."""

from __future__ import annotations

from random import Random

from skyfleet.engines.cuda.block_pool import PAGE, PagePool, page_digests, pool_size


def test_page_zero_is_nobodys() -> None:
    pool = PagePool(4)
    assert sorted(pool.hold_new(3) or []) == [1, 2, 3]
    assert pool.hold_new(1) is None


def test_a_known_beginning_is_held_up_to_its_first_gap() -> None:
    pool = PagePool(10)
    pages = pool.hold_new(3) or []
    for page, digest in zip(pages, (11, 12, 13), strict=True):
        pool.know(page, digest)
    assert pool.hold_known([11, 12, 99, 13]) == pages[:2]
    assert pool.hold_known([99, 11]) == []


def test_an_idle_page_keeps_its_content_until_it_is_needed_ends_before_beginnings() -> None:
    pool = PagePool(4)
    pages = pool.hold_new(3) or []
    for page, digest in zip(pages, (1, 2, 3), strict=True):
        pool.know(page, digest)
    pool.let_go(pages)
    assert pool.n_available == 3
    taken = pool.hold_new(1) or []
    assert taken == [pages[2]]
    assert pool.hold_known([1, 2, 3]) == pages[:2]


def test_a_page_that_two_hold_is_free_when_both_let_go() -> None:
    pool = PagePool(3)
    (page,) = pool.hold_new(1) or []
    pool.know(page, 5)
    assert pool.hold_known([5]) == [page]
    pool.let_go([page])
    assert pool.n_available == 1
    pool.let_go([page])
    assert pool.n_available == 2


def test_forgetting_makes_nothing_findable_and_loses_no_page() -> None:
    pool = PagePool(6)
    held, idle = pool.hold_new(2) or [], pool.hold_new(2) or []
    for page in (*held, *idle):
        pool.know(page, 100 + page)
    pool.let_go(idle)
    pool.forget_all()
    assert pool.hold_known([100 + idle[0]]) == []
    pool.let_go(held)
    assert pool.n_available == 5


def test_a_digest_stands_for_everything_before_it() -> None:
    one, other = list(range(40)), [9, *range(1, 40)]
    assert len(page_digests(one)) == 40 // PAGE
    assert not set(page_digests(one)) & set(page_digests(other))
    assert page_digests(one, page_digests(one[:16])) == page_digests(one)


def test_a_pool_holds_what_is_wanted_or_what_fits_and_one_page_of_nobodys() -> None:
    assert pool_size(100, 2, None) == 1 + 7  # of 16 tokens
    assert pool_size(100, 2, 5 * 32 + 31) == 1 + 5
    assert pool_size(100, 2, 1 << 20) == 1 + 7


def test_ten_thousand_random_deeds_leave_the_books_balanced() -> None:
    random, pool = Random(0), PagePool(30)
    holders: list[list[int]] = []
    for _ in range(10_000):
        deed = random.random()
        if deed < 0.4:
            digests = [hash(("d", random.randrange(4), n)) for n in range(random.randrange(6))]
            known = pool.hold_known(digests)
            fresh = pool.hold_new(random.randrange(4))
            if fresh is None:
                pool.let_go(known)
                continue
            for page, digest in zip(fresh, digests[len(known) :], strict=False):
                pool.know(page, digest)
            holders.append(known + fresh)
        elif holders and deed < 0.98:
            pool.let_go(holders.pop(random.randrange(len(holders))))
        elif deed > 0.995:
            pool.forget_all()
        assert pool.n_available == 29 - len({page for pages in holders for page in pages})
