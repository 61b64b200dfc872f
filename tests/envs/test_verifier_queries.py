"""The query API of verifiers."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator

import pytest

from skyfleet.envs.verifiers.tables import Query, Snapshot


@pytest.fixture
def hotels() -> Iterator[Snapshot]:
    connection = sqlite3.connect(":memory:")
    connection.executescript("""
        create table hotels (id integer primary key, city text, stars integer, note text);
        create table rooms (id integer primary key, hotel_id integer, price integer);
        insert into hotels values
            (1, 'London', 5, null), (2, 'Paris', 3, 'old'), (3, 'London', 4, 'new');
        insert into rooms values (10, 1, 90), (11, 3, 70);
        create table photos (hotel_id integer, file text);
        insert into photos values (1, 'a.png'), (2, 'b.png');
    """)
    yield Snapshot(connection)
    connection.close()


@pytest.mark.parametrize(
    ("narrow", "ids"),
    [
        (lambda q: q.eq("city", "London"), [1, 3]),
        (lambda q: q.neq("city", "London"), [2]),
        (lambda q: q.gt("stars", 4), [1]),
        (lambda q: q.gte("stars", 4), [1, 3]),
        (lambda q: q.lt("stars", 4), [2]),
        (lambda q: q.lte("stars", 4), [2, 3]),
        (lambda q: q.in_("id", [1, 2]), [1, 2]),
        (lambda q: q.in_("id", []), []),
        (lambda q: q.in_("id", (id for id in (1, 2))), [1, 2]),
        (lambda q: q.select(), [1, 2, 3]),
        (lambda q: q.not_in("id", [1, 2]), [3]),
        (lambda q: q.is_null("note"), [1]),
        (lambda q: q.not_null("note"), [2, 3]),
        (lambda q: q.ilike("city", "%LON%"), [1, 3]),
        (lambda q: q.eq("city", "London").eq("stars", 4), [3]),
        (lambda q: q.sort("stars", desc=True), [1, 3, 2]),
        (lambda q: q.sort("stars").limit(1), [2]),
    ],
)
def test_each_condition_narrows(
    hotels: Snapshot, narrow: Callable[[Query], Query], ids: list[int]
) -> None:
    assert [row["id"] for row in narrow(hotels.table("hotels")).all()] == ids


def test_select_first_count_and_join(hotels: Snapshot) -> None:
    london = hotels.table("hotels").eq("city", "London")
    assert london.select("id", "stars").first() == {"id": 1, "stars": 5}
    assert london.eq("stars", 1).first() is None
    assert london.limit(1).count() == 2
    joined = hotels.table("hotels").join("rooms", {"id": "hotel_id"}).lt("price", 80)
    assert [row["city"] for row in joined.all()] == ["London"]
    assert [row["id"] for row in joined.all()] == [3], "the first table's id, not the room's"
    assert hotels.tables() == ["hotels", "photos", "rooms"]


def test_every_join_is_to_the_first_table(hotels: Snapshot) -> None:
    rooms = hotels.table("hotels").join("rooms", {"id": "hotel_id"})
    assert rooms.join("photos", {"id": "hotel_id"}).select("file").all() == [{"file": "a.png"}]


def test_a_snapshot_may_be_asked_for_whole_rows(hotels: Snapshot) -> None:
    hotels.expect_row("hotels", {"city": "Paris"}, {"stars": 3, "note": "old"})
    hotels.expect_rows("hotels", {"city": "London"}, count=2, contains=[{"stars": 4}])
    hotels.expect_absent_row("hotels", {"city": "Rome"})
    failing: list[Callable[[], Snapshot]] = [
        lambda: hotels.expect_row("hotels", {"city": "Paris"}, {"stars": 4}),
        lambda: hotels.expect_row("hotels", {"city": "Rome"}, {}),
        lambda: hotels.expect_rows("hotels", {}, count=2),
        lambda: hotels.expect_rows("hotels", {}, contains=[{"city": "London", "stars": 3}]),
        lambda: hotels.expect_absent_row("hotels", {"city": "Paris"}),
    ]
    for fails in failing:
        with pytest.raises(AssertionError):
            fails()


def test_a_narrower_query_leaves_the_wider_as_it_was(hotels: Snapshot) -> None:
    wide = hotels.table("hotels")
    wide.eq("id", 1)
    assert wide.count() == 3


def test_assertions_pass_or_raise(hotels: Snapshot) -> None:
    first = hotels.table("hotels").eq("id", 1)
    first.assert_exists().assert_eq("stars", 5)
    first.count().assert_eq(1).assert_gt(0).assert_between(1, 2)
    hotels.table("hotels").eq("id", 9).assert_none()
    for fails in (
        first.assert_none,
        lambda: first.assert_eq("stars", 4),
        lambda: first.count().assert_eq(2),
        lambda: first.count().assert_gt(1),
        lambda: first.count().assert_between(2, 3),
        hotels.table("hotels").eq("id", 9).assert_exists,
        lambda: hotels.table("hotels").eq("id", 9).assert_eq("stars", 5),
    ):
        with pytest.raises(AssertionError):
            fails()
