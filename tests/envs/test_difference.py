"""Difference finds every change in a database and checks it field by field."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from skyfleet.envs.verifiers.difference import Difference, IgnoreConfig, Spec

SCHEMA = """
create table pets (id integer primary key, name text, age integer, extras text);
create table owners (pet_id integer, person text, primary key (pet_id, person));
create table notes (body text);
insert into pets values (1, 'rex', 3, '{"a": 1, "b": 2}'), (2, 'tom', 5, null);
insert into owners values (1, 'amy');
insert into notes values ('hello');
"""


@pytest.fixture
def before() -> Iterator[sqlite3.Connection]:
    yield from _database()


@pytest.fixture
def after() -> Iterator[sqlite3.Connection]:
    yield from _database()


def _database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    yield connection
    connection.close()


AGED: Spec = {
    "table": "pets",
    "pk": 1,
    "type": "modify",
    "resulting_fields": [("age", 4)],
    "no_other_changes": True,
}
BORN: Spec = {
    "table": "pets",
    "pk": 3,
    "type": "insert",
    "fields": [("id", 3), ("name", "kit"), ("age", ...), ("extras", None)],
}
SOLD: Spec = {"table": "owners", "pk": (1, "amy"), "type": "delete"}


def test_equal_states_have_no_difference(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    difference = Difference(before, after)
    assert difference.changes == ()
    assert difference.expect_exactly([]) is difference


def test_insert_modify_and_delete_are_each_matched_by_their_spec(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    after.execute("update pets set age = 4 where id = 1")
    after.execute("insert into pets values (3, 'kit', 0, null)")
    after.execute("delete from owners")
    difference = Difference(before, after)
    assert difference.expect_exactly([AGED, BORN, SOLD]) is difference
    assert difference.expect_only_v2([AGED, BORN, SOLD]) is difference


@pytest.mark.parametrize(
    ("sql", "complaint"),
    [
        ("update pets set age = 5 where id = 1", "age is 5, expected 4"),
        ("update pets set age = 4, name = 'max' where id = 1", "pets 1: unexpected name"),
        ("update pets set age = 4 where id = 2", "missing modify pets 1"),
        ("delete from notes", "unexpected delete notes 1"),
        ("select 1", "missing modify pets 1"),
    ],
)
def test_exactly_means_no_more_no_less_and_nothing_else(
    before: sqlite3.Connection, after: sqlite3.Connection, sql: str, complaint: str
) -> None:
    after.execute(sql)
    with pytest.raises(AssertionError, match=complaint):
        Difference(before, after).expect_exactly([AGED])


def test_an_expected_value_that_did_not_appear_is_a_mismatch(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    after.execute("update pets set age = 4 where id = 1")
    both = {**AGED, "resulting_fields": [("age", 4), ("name", "max")]}
    with pytest.raises(AssertionError, match="name is 'rex', expected 'max'"):
        Difference(before, after).expect_exactly([both])


def test_an_insert_must_account_for_every_column(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    after.execute("insert into pets values (3, 'kit', 0, 'spots')")
    with pytest.raises(AssertionError, match="extras is 'spots', expected None"):
        Difference(before, after).expect_exactly([BORN])
    with pytest.raises(AssertionError, match="unexpected age"):
        Difference(before, after).expect_exactly([{**BORN, "fields": [("id", 3)]}])


def test_allowed_changes_are_optional_and_others_fail(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    Difference(before, after).expect_only([AGED, BORN, SOLD])
    after.execute("update notes set body = 'bye'")
    with pytest.raises(AssertionError, match="notes"):
        Difference(before, after).expect_only([AGED, BORN, SOLD])


def test_allowed_changes_may_be_written_field_by_field(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    after.execute("update pets set age = 4 where id = 1")
    after.execute("insert into pets values (3, 'kit', 0, null)")
    allowed = [
        {"table": "pets", "pk": "1", "field": "age", "after": 4},
        {"table": "pets", "pk": 3, "field": None, "after": "__added__"},
    ]
    Difference(before, after).expect_only(allowed)
    with pytest.raises(AssertionError, match="unexpected modify pets 1"):
        Difference(before, after).expect_only(allowed[1:])
    with pytest.raises(AssertionError, match="unexpected insert pets 3"):
        Difference(before, after).expect_only(allowed[:1])


def test_the_older_spelling_ignores_type(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    after.execute("update pets set age = 4 where id = 1")
    Difference(before, after).expect_only_v2([AGED])
    with pytest.raises(AssertionError, match="unexpected modify pets 1"):
        Difference(before, after).expect_only([AGED])


def test_a_spec_without_a_key_allows_nothing(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    after.execute("update pets set age = 4 where id = 1")
    with pytest.raises(AssertionError, match="unexpected modify pets 1"):
        Difference(before, after).expect_only([{"table": "pets", "field": "age", "after": 4}])


def test_columns_may_be_allowed_and_forbidden(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    after.execute("update pets set age = 4 where id = 1")
    after.execute("delete from owners")
    difference = Difference(before, after)
    difference.expect(allow=[{"table": "pets", "field": "age"}], forbid=[{"table": "pets"}])
    with pytest.raises(AssertionError, match="unexpected modify pets 1"):
        difference.expect(allow=[{"table": "pets", "field": "name"}])
    with pytest.raises(AssertionError, match="unexpected modify pets 1"):
        difference.expect(forbid=[{"table": "pets", "field": "age"}])
    with pytest.raises(AssertionError, match="unexpected delete owners"):
        difference.expect(forbid=[{"table": "owners"}])


def test_rows_without_a_primary_key_go_by_their_id_while_it_is_their_own(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    for state in (before, after):
        state.executescript("create table tags (id, label); insert into tags values (7, 'old')")
    after.execute("update tags set label = 'new'")
    assert [change.pk for change in Difference(before, after).changes] == [7]
    after.execute("insert into tags values (7, 'hidden')")
    kinds = sorted(change.kind for change in Difference(before, after).changes)
    assert kinds == ["delete", "insert", "insert"]


def test_ignored_tables_and_fields_are_not_compared(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    after.execute("update pets set age = 9")
    after.execute("delete from notes")
    ignore = IgnoreConfig(tables={"notes"}, table_fields={"pets": {"age"}})
    Difference(before, after, ignore).expect_exactly([])
    with pytest.raises(AssertionError):
        Difference(before, after, IgnoreConfig(fields={"age"})).expect_exactly([])


def test_equal_json_in_other_spelling_is_no_change(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    after.execute("""update pets set extras = '{"b":2,"a":1}' where id = 1""")
    assert Difference(before, after).changes == ()
    after.execute("""update pets set extras = '{"b":2,"a":7}' where id = 1""")
    assert [change.kind for change in Difference(before, after).changes] == ["modify"]


def test_an_invalid_spec_is_an_error(before: sqlite3.Connection, after: sqlite3.Connection) -> None:
    after.execute("update pets set age = 4 where id = 1")
    difference = Difference(before, after)
    with pytest.raises(ValueError, match="no table"):
        difference.expect_exactly([{**AGED, "table": "cats"}])
    with pytest.raises(ValueError, match="type"):
        difference.expect_exactly([{"table": "pets", "pk": 1}])
    with pytest.raises(ValueError, match="no_other_changes"):
        difference.expect_exactly([{**AGED, "no_other_changes": None}])


def test_rows_with_a_null_in_their_primary_key_do_not_hide_each_other(
    before: sqlite3.Connection, after: sqlite3.Connection
) -> None:
    for state in (before, after):
        state.executescript(
            "create table t (id text primary key, v); insert into t values (null, 1), (null, 2);"
            "create table u (a, b, primary key (a, b)); insert into u values (1, null), (1, null), (1, null)"
        )
    after.execute("update t set v = 9 where v = 1")
    after.execute("delete from u where rowid = 1")
    assert [str(change) for change in Difference(before, after).changes] == [
        "modify t 1: v=9",
        "delete u 1: a=1, b=None",
    ]
