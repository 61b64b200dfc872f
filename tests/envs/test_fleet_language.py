"""The verifier API gives the results of fleet-python, except for its defects."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.envs.two_executors import CLOCK_WARNING, Score, both_scores

from skyfleet.worlds.database import Database

pytestmark = CLOCK_WARNING

BEFORE = """
create table pets (id integer primary key, name text, age integer, extras text);
create table owners (pet_id integer, person text, primary key (pet_id, person));
create table tags (id integer, label text);
create table notes (body text);
insert into pets values (1, 'rex', 3, '{"a": 1, "b": 2}'), (2, 'tom', 5, null);
insert into owners values (1, 'amy'), (2, 'bob');
insert into tags values (3, 'old'), (41, 'new');
insert into notes values ('hello');
"""
AFTER = """
update pets set age = 4 where id = 1;
insert into pets values (3, 'kit', 0, null);
delete from owners where pet_id = 2;
update tags set label = 'newer' where id = 41;
"""
AGED = """{"table": "pets", "pk": 1, "type": "modify", "resulting_fields": [("age", 4)],
           "no_other_changes": True}"""
BORN = """{"table": "pets", "pk": "3", "type": "insert",
           "fields": [("id", 3), ("name", "kit"), ("age", ...), ("extras", None)]}"""
SOLD = """{"table": "owners", "pk": (2, "bob"), "type": "delete"}"""
RETAGGED = """{"table": "tags", "pk": 41, "type": "modify", "resulting_fields": [("label", ...)],
               "no_other_changes": False}"""
ALL = f"[{AGED}, {BORN}, {SOLD}, {RETAGGED}]"
UNCHANGED = "4), ('name', 'max')]"
PETS = 'current.table("pets")'


def _image(*scripts: str) -> bytes:
    with closing(Database()) as db:
        for script in scripts:
            db.connection.executescript(script)
        return db.image()


def _verifier(body: str) -> str:
    """Scores 1 when the body, an expression, is true or returns at all, and 0 when it asserts."""
    return f"""
def validate_task(env, final_answer=None):
    seed, current = env.db("seed"), env.db("current")
    try:
        return 0 if ({body}) is False else 1
    except AssertionError:
        return 0
"""


@pytest.mark.parametrize(
    ("body", "score"),
    [
        (f"seed.diff(current).expect_exactly({ALL})", 1),
        (f"seed.diff(current).expect_exactly([{AGED}, {BORN}, {SOLD}])", 0),
        (f"seed.diff(seed).expect_exactly({ALL})", 0),
        (f"seed.diff(current).expect_only_v2({ALL})", 1),
        (f"seed.diff(seed).expect_only_v2({ALL})", 1),
        ("seed.diff(current).expect_only_v2([])", 0),
        (f"seed.diff(current).expect_only_v2({ALL.replace('4)', '5)')})", 0),
        (f"seed.diff(current).expect_only_v2({ALL.replace('True', '1')})", None),
        (f"seed.diff(current).expect_only({ALL})", 0),
        (
            """seed.diff(current, IgnoreConfig(["tags"])).expect_only([
                {"table": "pets", "pk": "1", "field": "age", "after": 4},
                {"table": "pets", "pk": 3, "field": None, "after": "__added__"},
                {"table": "owners", "pk": [2, "bob"], "after": "__removed__"}])""",
            1,
        ),
        (
            """seed.diff(current).expect_only_v2([
                {"table": "pets", "field": "age", "after": 4}])""",
            0,
        ),
        (f"seed.diff(current, IgnoreConfig(None, None, None)).expect_exactly({ALL})", 1),
        (f"SnapshotDiff(seed, current, IgnoreConfig()).expect_exactly({ALL})", 1),
        ("seed.diff(current, IgnoreConfig({'pets', 'owners', 'tags'})).expect_exactly([])", 1),
        ("seed.diff(current).expect(allow=[{'table': 'pets', 'field': 'age'}])", 0),
        (
            """seed.diff(current).expect(allow=[
                {"table": "pets", "field": "age"}, {"table": "tags", "field": "label"}])""",
            1,
        ),
        ("seed.diff(current).expect(forbid=[{'table': 'pets', 'field': 'age'}])", 0),
        ("seed.diff(current).expect(forbid=[{'table': 'owners'}])", 0),
        ("seed.diff(current).expect(forbid=[{'table': 'notes'}])", 1),
        ("IgnoreConfig(fields={'a'}).should_ignore_field('t', 'a')", 1),
        ("IgnoreConfig(tables={'t'}).should_ignore_table('u')", 0),
        (f"list({PETS}.select().first()) == ['id', 'name', 'age', 'extras']", 1),
        (f"{PETS}.in_('id', (i for i in [1, 3])).count().value == 2", 1),
        (f"{PETS}.not_in('id', {{1, 3}}).first()['name'] == 'tom'", 1),
        (f"{PETS}.count().assert_between(3, 4).assert_gt(2)", 1),
        (f"{PETS}.count().assert_between(4, 9)", 0),
        (f"{PETS}.eq('extras', None).first() is None", 1),
        (f"{PETS}.eq('id', '1').first()['age'] == 4", 1),
        (f"{PETS}.eq('age', '4').assert_eq('breed', None)", 1),
        (f"{PETS}.eq('id', 9).assert_eq('name', None)", 0),
        (f"'pets' in {PETS}.eq('id', 9).explain()", 1),
        (f"{PETS}.eq('breed', 9).all()", None),
        ("current.table('cats').all()", None),
        (
            """current.table("pets").join("owners", {"id": "pet_id"})
                .join("tags", {"id": "id"}).all() == []""",
            1,
        ),
        ("seed.table('pets').join('tags', {'age': 'id'}).first()['id'] == 1", 1),
        (
            """seed.table("owners").join("pets", {"pet_id": "id"}).sort("person", desc=True)
                .first()["person"] == 'bob' """,
            1,
        ),
        ("current.expect_row('pets', {'id': 1}, {'age': 4, 'name': 'rex'})", 1),
        ("current.expect_row('pets', {'id': 1}, {'age': 3})", 0),
        ("current.expect_rows('pets', {}, count=3, contains=[{'name': 'kit'}])", 1),
        ("current.expect_rows('pets', {}, contains=[{'name': 'kit', 'age': 9}])", 0),
        ("current.expect_absent_row('owners', {'person': 'bob'})", 1),
        ("normalized_contains('Caf\u00e9 d\u2019Or', 'the CAF\u00c9 - d\u2019or!')", 1),
        ("normalized_contains('d\u2019Or', \"d'Or\")", 0),
        ("normalized_contains('a1', {'a': 1})", 1),
        ("normalized_string_comparison('\u20ac50', '50')", 0),
        ("contains_number('it is 1,200.50', '1,200.5')", 1),
        ("contains_number('it is 12', 'twelve')", 0),
        ("contains_number('it is 1', True)", 1),
        ("contains_number('it is 1', None)", None),
        ("contains_number(final_answer, 1)", None),
    ],
)
def test_verifier_calls_score_as_under_fleet(tmp_path: Path, body: str, score: Score) -> None:
    states = _image(BEFORE), _image(BEFORE, AFTER)
    assert both_scores(tmp_path, _verifier(body), *states) == (score, score)


@pytest.mark.parametrize(
    "code",
    [
        "@verifier(\n    key='a',\n)\ndef validate_task(env): return 1",
        "from fleet.verifiers import IgnoreConfig\nimport fleet\ndef main(env): return 1",
        "def verify(): return 1",
        "def verify(env, said): return 0 if said else 1",
        "def validate_task(env): return helper() - 2\ndef helper(): return 3",
    ],
)
def test_the_function_is_found_and_called_the_same(tmp_path: Path, code: str) -> None:
    assert both_scores(tmp_path, code, _image(BEFORE), _image(BEFORE)) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("body", "write", "theirs", "ours"),
    [
        # A row that no spec names, in a table that some spec does, is not looked at by fleet.
        (f"seed.diff(current).expect_only_v2({ALL})", "delete from pets where id = 2", 1, 0),
        # Nor is a modified row of any table that no spec names.
        (f"seed.diff(current).expect_only_v2({ALL})", "update notes set body = 'bye'", 1, 0),
        # A wanted value is not missed by fleet where the column stayed as it was.
        (
            f"seed.diff(current).expect_exactly({ALL.replace('4)]', UNCHANGED)})",
            "",
            1,
            0,
        ),
        # An ignored column that changed makes its row a change for fleet.
        (
            f"seed.diff(current, IgnoreConfig(fields={{'body'}})).expect_exactly({ALL})",
            "update notes set body = 'bye'",
            0,
            1,
        ),
        # JSON in another spelling is the same for fleet's expect_only_v2, not for expect_exactly.
        (
            f"seed.diff(current).expect_exactly({ALL})",
            """update pets set extras = '{"b":2, "a":1}' where id = 1""",
            0,
            1,
        ),
        # A spec of a table that is not there is a broken verifier.
        (
            "seed.diff(seed).expect_exactly([{'table': 'x', 'pk': 1, 'type': 'delete'}])",
            "",
            0,
            None,
        ),
        # A count is no number for fleet, so comparing it is always false.
        (f"{PETS}.count() == 3", "", 0, 1),
    ],
)
def test_cases_where_our_grade_differs_from_fleets_on_purpose(
    tmp_path: Path, body: str, write: str, theirs: Score, ours: Score
) -> None:
    states = _image(BEFORE), _image(BEFORE, AFTER, write)
    assert both_scores(tmp_path, _verifier(body), *states) == (theirs, ours)


def test_a_helper_that_stands_first_is_not_taken_for_the_verifier(tmp_path: Path) -> None:
    code = "def helper(env): return 0\ndef validate_task(env): return 1 + helper(env)"
    assert both_scores(tmp_path, code, _image(BEFORE), _image(BEFORE)) == (0.0, 1.0)
