"""Where a verifier runs, how often it is retried, and that an unknown grade is never zero."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.fakes.jails import BWRAP, CURRENT, SEED, verifier

from skyfleet.envs.verifiers import grading
from skyfleet.envs.verifiers.difference import Difference
from skyfleet.envs.verifiers.grading import grade_state
from skyfleet.envs.verifiers.jail import Jail
from skyfleet.envs.verifiers.printed import partial_reward
from skyfleet.envs.verifiers.run_verifier import (
    BrokenVerifierError,
    load_state,
    run_verifier,
)
from skyfleet.envs.verifiers.write_verifier import is_written_here, write_verifier
from skyfleet.errors import VerifierError
from skyfleet.worlds.catalog import generate_world_tasks, get_world
from skyfleet.worlds.env import WorldEnv

PID = verifier("import os; return os.getpid()")


@pytest.fixture(scope="module")
def jail() -> Iterator[Jail]:
    with Jail(n_workers=1) as jail:
        yield jail


@pytest.fixture
def current() -> Iterator[sqlite3.Connection]:
    with closing(load_state(CURRENT)) as connection:
        yield connection


async def test_source_written_here_runs_in_process_and_any_other_in_the_jail(
    current: sqlite3.Connection,
) -> None:
    with closing(load_state(SEED)) as seed:
        code = write_verifier(Difference(seed, current).changes, "tom")
    strange = code + "#"
    assert (is_written_here(code), is_written_here(strange)) == (True, False)
    with Jail(n_workers=1) as jail:
        ours = await grade_state(code, SEED, current, "tom", jail=jail)
        assert jail.pids == []
        theirs = await grade_state(strange, SEED, current, "tom", jail=jail)
        assert len(jail.pids) == 1
    assert ours.success
    assert theirs == ours


@BWRAP
@pytest.mark.parametrize(
    ("body", "n_tries"),
    [
        ("return 0", 1),
        ("return 1 / 0", 3),
        ("return env.db('current').table('cats').count()", 3),
        ("print('JUDGE ERROR: 529 overloaded'); return 0", 3),
        ("import os; os._exit(3)", 3),
        ("return (", 1),
        ("import time; time.sleep(60)", 1),
    ],
)
async def test_what_failed_is_tried_again_unless_it_never_runs(
    jail: Jail, current: sqlite3.Connection, body: str, n_tries: int
) -> None:
    # Every try is a fork, and inside the walls nobody else takes a number.
    before = await grade_state(PID, SEED, current, None, jail=jail)
    if body == "return 0":
        assert (await grade_state(verifier(body), SEED, current, None, jail=jail)).reward == 0.0
    else:
        with pytest.raises(VerifierError):
            await grade_state(verifier(body), SEED, current, None, timeout_seconds=0.5, jail=jail)
    after = await grade_state(PID, SEED, current, None, jail=jail)
    assert after.reward - before.reward == n_tries + 1


@BWRAP
async def test_a_retry_that_succeeds_gives_the_grade(
    jail: Jail, current: sqlite3.Connection
) -> None:
    code = verifier("import os; assert os.getpid() % 3 == 0; return 1")
    for _ in range(3):
        assert (await grade_state(code, SEED, current, None, jail=jail)).success


async def test_a_world_grades_foreign_tasks_in_the_jail() -> None:
    (task,) = generate_world_tasks("github", split="all", count=1)
    assert task.verifier_code is not None
    env = WorldEnv(
        get_world("github"),
        task.model_copy(update={"verifier_code": f"# by a stranger\n{task.verifier_code}"}),
    )
    await env.reset()
    grade = await env.grade()
    await env.close()
    assert (grade.reward, "ERROR_ACCUMULATOR" in grade.explanation) == (0.0, True)
    assert grading.shared_jail().pids


@pytest.mark.parametrize(
    "signature",
    [
        "env, final_answer",
        "env, final_answer=None, conversation=None",
        "env, conversation, final_answer",
        "env, final_answer=None, *args, **kwargs",
        "env, *, final_answer, conversation=None",
        "env, answer",
        "env, answer, conversation",
        "env, *args",
        "env, **kwargs",
    ],
)
def test_a_verifier_gets_the_arguments_that_its_signature_names(
    current: sqlite3.Connection, signature: str
) -> None:
    code = f"""def verify({signature}):
    received = {{key: value for key, value in locals().items() if key != "env"}}
    print("tom" in str(received), "purr" in str(received))"""
    grade = run_verifier(code, current, current, "tom", conversation='["purr"]')
    assert grade.explanation == f"True {'conversation' in signature}\n"


@pytest.mark.parametrize("signature", ["", "env"])
def test_a_verifier_need_not_ask_for_anything(current: sqlite3.Connection, signature: str) -> None:
    assert run_verifier(f"def verify({signature}): return 1", current, current, "tom").success


def test_source_that_can_never_run_is_distinguished_from_a_crash(
    current: sqlite3.Connection,
) -> None:
    for code in ("def verify(", "score = 1", "def verify(env): '\0'"):
        with pytest.raises(BrokenVerifierError):
            run_verifier(code, current, current, None)
    with pytest.raises(VerifierError, match="ValueError: bad after it printed 'so far") as crash:
        run_verifier(verifier("print('so far'); raise ValueError('bad')"), current, current, None)
    assert not isinstance(crash.value, BrokenVerifierError)


def _block(kind: str, *entries: str) -> str:
    return f">>> {kind}_ACCUMULATOR >>>\n{list(entries)}\n<<< {kind}_ACCUMULATOR <<<\n"


def _app(name: str, passed: int, *successes: str) -> str:
    output = _block("SUCCESS", *successes)
    return f"<<< VERIFY_{name} <<<\n{output}>>> VERIFY_{name} >>>\nApp {name}: {passed}\n"


@pytest.mark.parametrize(
    ("stdout", "share"),
    [
        (_block("ERROR", "a") + _block("SUCCESS", "b", "c, d", "e"), 0.75),
        (_block("ERROR", "a", "b"), 0.0),
        (_block("SUCCESS", "a"), 1.0),
        (_block("ERROR", "a") + _block("SUCCESS", "b") + _block("ERROR", "c", "d"), 0.25),
        ("nothing of the kind", None),
        (">>> ERROR_ACCUMULATOR >>>\nnot a list\n<<< ERROR_ACCUMULATOR <<<", None),
        (_app("mail", 1, "sent") + _app("drive", 0) + _app("docs", 0), 1 / 3),
        (_app("mail", 0) + _app("files", 1, "No filesystem changes expected"), 0.0),
        (_app("mail", 1, "[C] no unexpected changes"), None),
    ],
)
def test_partial_credit_is_the_share_of_checks_that_passed(
    stdout: str, share: float | None
) -> None:
    assert partial_reward(stdout) == share


@pytest.mark.parametrize(
    ("printed", "returned", "reward"),
    [
        (_block("ERROR", "a") + _block("SUCCESS", "b"), 0, 0.5),
        (_block("ERROR", "a") + _block("SUCCESS", "b"), 1, 1.0),
        (_block("SUCCESS", "b"), 0, 0.0),
        ("", 0, 0.0),
    ],
)
async def test_partial_credit_takes_the_place_of_a_zero_and_never_passes(
    jail: Jail, current: sqlite3.Connection, printed: str, returned: int, reward: float
) -> None:
    code = verifier(f"print({printed!r}); return {returned}")
    grade = await grade_state(code, SEED, current, None, partial_credit=True, jail=jail)
    assert (grade.reward, grade.success) == (reward, returned == 1)
    assert (await grade_state(code, SEED, current, None, jail=jail)).reward == returned
