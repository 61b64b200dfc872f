"""A frozen state caches its reads and cannot change."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from random import Random

import pytest

from skyfleet.envs.verifiers import states as frozen
from skyfleet.envs.verifiers.difference import Difference
from skyfleet.envs.verifiers.run_verifier import load_state
from skyfleet.envs.verifiers.states import find_touched_tables, load_frozen_state


def image(*names: str) -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table users (id integer primary key, name text)")
    connection.execute("create table empty (id integer primary key)")
    connection.executemany("insert into users (name) values (?)", [(name,) for name in names])
    connection.commit()
    return connection.serialize()


def row_by_row(image: bytes, after: sqlite3.Connection) -> list[str]:
    """The changes as they are found where pages do not tell."""
    before = load_state(image)
    before.execute("begin")
    assert find_touched_tables(before, after) is None
    return list(map(str, Difference(before, after).changes))


def test_the_same_image_is_the_same_state() -> None:
    assert load_frozen_state(image("ada")) is load_frozen_state(image("ada"))
    assert load_frozen_state(image("ada")) is not load_frozen_state(image("bob"))


def test_a_frozen_state_is_read_only() -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        load_frozen_state(image("ada")).execute("insert into users (name) values ('eve')")


def test_bytes_that_are_the_same_are_no_difference() -> None:
    before, after = load_frozen_state(image("ada")), load_state(image("ada"))
    after.execute("select * from users").fetchall()
    assert find_touched_tables(before, after) == set()
    assert Difference(before, after).changes == ()


def test_only_tables_with_other_bytes_are_read_again() -> None:
    before, after = load_frozen_state(image("ada")), load_state(image("ada"))
    after.execute("insert into empty values (7)")
    assert find_touched_tables(before, after) == {"empty"}


@pytest.mark.parametrize(
    ("sql", "output"),
    [
        ("insert into users (name) values ('eve')", ["insert users 2: id=2, name='eve'"]),
        ("update users set name = 'eve'", ["modify users 1: name='eve'"]),
        ("delete from users", ["delete users 1: id=1, name='ada'"]),
        ("create table more (id integer)", []),
        ("insert into empty values (7)", ["insert empty 7: id=7"]),
    ],
)
def test_cached_reads_are_valid_in_the_next_comparison(sql: str, output: list[str]) -> None:
    before = load_frozen_state(image("ada"))
    for _ in range(2):
        after = load_state(image("ada"))
        after.execute(sql)
        assert list(map(str, Difference(before, after).changes)) == output
        assert row_by_row(image("ada"), after) == output


def test_a_row_that_was_taken_out_and_put_back_is_no_change() -> None:
    after = load_state(image("ada", "bob"))
    after.execute("delete from users where id = 1")
    after.execute("insert into users values (1, 'ada')")
    assert Difference(load_frozen_state(image("ada", "bob")), after).changes == ()


def test_states_that_fall_out_of_the_cache_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "MAX_STATES", 2)
    monkeypatch.setattr(frozen, "_states", OrderedDict())
    ada, bob = load_frozen_state(image("ada")), load_frozen_state(image("bob"))
    assert load_frozen_state(image("ada")) is ada
    load_frozen_state(image("eve"))
    assert ada.execute("select name from users").fetchall() == [("ada",)]
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        bob.execute("select name from users")
    assert load_frozen_state(image("bob")) is not bob


WORDS = ("", "a", "bb" * 40, "c" * 9000)
"""The last overflows its page."""


def random_deed(random: Random, connection: sqlite3.Connection) -> None:
    table, word = random.choice("abcd"), random.choice(WORDS)
    at = random.randrange(60)
    match random.randrange(5):
        case 0 | 1:
            connection.execute(f"insert or replace into {table} values (?, ?)", (at, word))
        case 2:
            connection.execute(f"update {table} set word = ? where id >= ?", (word, at))
        case 3:
            connection.execute(f"delete from {table} where id between ? and ?", (at, at + 25))
        case 4:
            connection.execute(f"delete from {table}")


@pytest.mark.parametrize("seed", range(60))
def test_pages_hide_no_change_however_tables_grow_shrink_and_take_each_others_room(
    seed: int,
) -> None:
    random, first = Random(seed), sqlite3.connect(":memory:", isolation_level=None)
    first.execute(f"pragma auto_vacuum = {seed % 3}")  # where it is on, pages also move
    for table in "abcd":
        first.execute(f"create table {table} (id integer primary key, word text)")
    first.execute("create index by_word on b (word)")
    for _ in range(random.randrange(60)):
        random_deed(random, first)
    image = first.serialize()
    after = load_state(image)
    for _ in range(random.randrange(1, 12)):
        random_deed(random, after)
    quick = Difference(load_frozen_state(image), after).changes
    assert list(map(str, quick)) == row_by_row(image, after)


def test_a_database_without_any_table_is_a_state_too() -> None:
    full, empty = load_state(image("ada")), load_state(b"")
    assert Difference(empty, load_state(b"")).changes == ()
    assert list(map(str, Difference(empty, full).changes)) == ["insert users 1: id=1, name='ada'"]
    assert list(map(str, Difference(full, empty).changes)) == ["delete users 1: id=1, name='ada'"]


def test_what_is_not_committed_is_a_change_too() -> None:
    after = load_state(image("ada"))
    after.execute("begin")
    after.execute("update users set name = 'eve'")
    changes = Difference(load_frozen_state(image("ada")), after).changes
    assert list(map(str, changes)) == ["modify users 1: name='eve'"]


def test_a_table_that_comes_or_goes_is_not_hidden_by_its_pages() -> None:
    after = load_state(image("ada"))
    after.execute("drop table empty")
    after.execute("create table other (id integer primary key)")
    after.execute("insert into other values (3)")
    changes = Difference(load_frozen_state(image("ada")), after).changes
    assert list(map(str, changes)) == ["insert other 3: id=3"]


def test_a_table_is_not_hidden_by_a_schema_of_many_pages() -> None:
    many = sqlite3.connect(":memory:", isolation_level=None)
    many.execute("pragma page_size = 512")
    for number in range(30):
        many.execute(f"create table t{number} (id integer primary key, note text)")
    after = load_state(many.serialize())
    after.execute("create table other (id integer primary key)")
    after.execute("insert into other values (3)")
    before = load_frozen_state(many.serialize())
    assert find_touched_tables(before, after) is None
    assert list(map(str, Difference(before, after).changes)) == ["insert other 3: id=3"]


def test_what_sqlite_counts_for_itself_is_no_change() -> None:
    counted = sqlite3.connect(":memory:", isolation_level=None)
    counted.execute("create table pets (id integer primary key autoincrement, name text)")
    after = load_state(counted.serialize())
    after.execute("insert into pets (name) values ('rex')")
    after.execute("delete from pets")
    assert Difference(load_frozen_state(counted.serialize()), after).changes == ()


@pytest.mark.parametrize(
    ("columns", "sql", "output"),
    [
        ("fts5(title)", "insert into found values ('evil')", "insert found 2: title='evil'"),
        ("fts5(title)", "delete from found", "delete found 1: title=1"),
        ("rtree(id, a, b)", "update found set b = 9", "modify found 1: b=9.0"),
    ],
)
def test_a_virtual_table_is_compared_though_it_has_no_page(
    columns: str, sql: str, output: str
) -> None:
    first = load_state(image("ada"))
    first.execute(f"create virtual table found using {columns}")
    width = len(first.execute("pragma table_info(found)").fetchall())
    first.execute(f"insert into found values ({', '.join('1' * width)})")
    after = load_state(first.serialize())
    assert find_touched_tables(load_frozen_state(first.serialize()), after) == set()
    after.execute(sql)
    changes = list(map(str, Difference(load_frozen_state(first.serialize()), after).changes))
    assert output in changes
    assert changes == row_by_row(first.serialize(), after)
