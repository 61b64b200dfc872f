"""A verifier's result becomes a grade, and a broken verifier never becomes a zero."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from skyfleet.envs.verifiers.run_verifier import (
    contains_number,
    extract_numbers,
    normalized_contains,
    normalized_string_comparison,
    run_verifier,
)
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade


@pytest.fixture
def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table pets (id integer primary key, name text)")
    yield connection
    connection.close()


def _grade(code: str, database: sqlite3.Connection, answer: str | None = None) -> Grade:
    return run_verifier(code, database, database, answer)


@pytest.mark.parametrize(
    ("result", "reward", "success"),
    [
        ("1", 1.0, True),
        ("True", 1.0, True),
        ("None", 1.0, True),
        ("0", 0.0, False),
        ("False", 0.0, False),
        ("0.5", 0.5, False),
        ("TASK_SUCCESSFUL_SCORE", 1.0, True),
    ],
)
def test_the_return_value_is_the_reward(
    database: sqlite3.Connection, result: str, reward: float, success: bool
) -> None:
    grade = _grade(f"def verify(env):\n    return {result}", database)
    assert (grade.reward, grade.success) == (reward, success)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("def validate_task(env:", "SyntaxError"),
        ("score = 1", "no function"),
        ("def validate_task(env): return 1 / 0", "ZeroDivisionError"),
        ("def validate_task(env): assert False", "AssertionError"),
        ("def validate_task(env): raise SystemExit(0)", "SystemExit"),
        ("def validate_task(env): return 'yes'", "returned 'yes'"),
        ("def validate_task(env): return float('nan')", "returned nan"),
        ("def validate_task(env): return env.db('current').table('cats').first()", "no such table"),
        ("def validate_task(env): env.db('current').table('pets').eq('age', 1).all()", "age"),
        ("def validate_task(env): env.db('other')", "KeyError"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
    ],
)
def test_a_broken_verifier_is_an_error_and_not_a_zero(
    database: sqlite3.Connection, code: str, complaint: str
) -> None:
    with pytest.raises(VerifierError, match=complaint):
        _grade(code, database)


def test_it_receives_the_answer_and_its_output_is_kept(
    database: sqlite3.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
from fleet.verifiers import something

def helper(text):
    print("heard", text)
    return text == "blue"

def validate_task_abc_123(env: Environment, final_answer: str | None = None) -> int:
    env.instance.load()
    return TASK_SUCCESSFUL_SCORE if helper(final_answer) else TASK_FAILED_SCORE
"""
    grade = _grade(code, database, "blue")
    assert (grade.success, grade.explanation) == (True, "heard blue\n")
    assert not _grade(code, database, None).success
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("partial_credit", [False, True])
@pytest.mark.parametrize(
    "code",
    [
        "async def verify(env):\n    return 0.5\n",
        "async def verify(env):\n"
        "    await env.instance.load()\n"
        "    pets = await env.db('seed').table('pets').all()\n"
        "    return 0.5 + len(pets)\n",
        "async def count(db):\n    return len(await db.table('pets').all())\n"
        "async def verify(env):\n    return 0.5 + await count(env.db())\n",
        "import asyncio\nasync def verify(env):\n    await asyncio.sleep(0)\n    return 0.5\n",
        "async def half(env):\n    return 0.5\ndef verify(env):\n    return half(env)\n",
    ],
    ids=["plain", "awaits queries", "awaits a function", "gives way", "returned by another"],
)
def test_an_async_verifier_is_run_to_its_end(
    code: str, partial_credit: bool, database: sqlite3.Connection
) -> None:
    grade = run_verifier(code, database, database, None, partial_credit=partial_credit)
    assert grade.reward == 0.5


def test_an_async_verifier_that_waits_for_an_event_loop_gives_no_grade(
    database: sqlite3.Connection,
) -> None:
    code = "import asyncio\nasync def verify(env):\n    await asyncio.sleep(1)\n    return 1\n"
    with pytest.raises(VerifierError, match="no running event loop"):
        _grade(code, database)
    code = (
        "class Pending:\n    def __await__(self):\n        yield self\n"
        "async def verify(env):\n    await Pending()\n"
    )
    with pytest.raises(VerifierError, match="which needs an event loop; await queries only"):
        _grade(code, database)


def test_runs_do_not_see_each_other(database: sqlite3.Connection) -> None:
    code = "runs = []\ndef verify(env):\n    runs.append(1)\n    return len(runs) == 1"
    assert [_grade(code, database).success for _ in range(3)] == [True, True, True]


def test_answers_are_compared_without_case_and_punctuation() -> None:
    assert normalized_contains("Grand Inn", "it is the GRAND-inn.")
    assert not normalized_contains("Grand Inn", "the Grand Palace")
    assert normalized_contains("b", {"a": "B"})
    assert normalized_string_comparison("Grand Inn", " grand inn! ")
    assert not normalized_string_comparison("3", "13")
    assert extract_numbers("1,200 of -3.5") == [1200.0, -3.5]
    assert contains_number("costs 1,200", "1200")
    assert not contains_number("costs 12", 2)
    assert not contains_number("costs 12", "twelve")
