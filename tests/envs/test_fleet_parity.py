"""A verifier gives the same score here as under fleet-python's own executor."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from random import Random

import pytest
from tests.envs.two_executors import CLOCK_WARNING, both_scores

from skyfleet.envs.tools import ToolError
from skyfleet.envs.verifiers.printed import compute_partial_credit
from skyfleet.envs.verifiers.run_verifier import load_state, run_verifier
from skyfleet.tasks.task import RecordedCall, Task
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks, get_world
from skyfleet.worlds.toolkit import App

pytestmark = CLOCK_WARNING

REPO = Path(__file__).parents[2]
FLEET_TASKS = Path(
    os.environ.get("SKYFLEET_FLEET_TASKS", REPO / "../shared/data/fleet_booking_tasks.json")
)
has_fleet_tasks = pytest.mark.skipif(
    not FLEET_TASKS.exists(),
    reason=f"no {FLEET_TASKS}; SKYFLEET_FLEET_TASKS names Fleet's public booking tasks",
)


def _data_seed(task: Task) -> int:
    return int((task.data_key or "").removeprefix("seed-"))


def _image_after(task: Task, calls: Sequence[RecordedCall], spoil: Callable[[App], None]) -> bytes:
    world = get_world(task.env_key)
    app = world.open(_data_seed(task), task.env_variables)
    with closing(app.db):
        for call in calls:
            try:
                world.toolkit.call(app, call.name, call.arguments)
            except ToolError:
                continue  # some fail on purpose
        spoil(app)
        return app.db.image()


def _nothing(app: App) -> None:
    pass


def _lose_a_row(app: App) -> None:
    tables = app.db.column("select name from sqlite_master where type = 'table' order by name")
    table = next(name for name in tables if app.db.row(f'select * from "{name}"'))
    app.db.write(f'delete from "{table}" where rowid = (select max(rowid) from "{table}")')


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_tasks_of_a_world_score_the_same_solved_undone_half_done_and_overdone(
    name: str, tmp_path: Path
) -> None:
    world = get_world(name)
    for task in generate_world_tasks(name, split="all", count=15, seed=5):
        code, seed = task.verifier_code or "", world.image(_data_seed(task))
        calls = [call for call in task.solution if call.name != "submit_final_answer"]
        output = [call.arguments["answer"] for call in task.solution if call not in calls]
        answer = output[0] if output else None
        solved = _image_after(task, calls, _nothing)
        wrong = [(seed, None), (_image_after(task, calls, _lose_a_row), answer)]
        if answer is not None:
            wrong.append((solved, f"{answer} or another"))
        elif len(calls) > 1:
            wrong.append((_image_after(task, calls[:-1], _nothing), None))
        assert both_scores(tmp_path, code, seed, solved, answer) == (1.0, 1.0), task.key
        for current, words in wrong:
            assert both_scores(tmp_path, code, seed, current, words) == (0.0, 0.0), task.key


@has_fleet_tasks
def test_fleets_booking_verifiers_run_to_a_score_on_an_untouched_world(tmp_path: Path) -> None:
    seed = get_world("booking").image(3)
    scores = [both_scores(tmp_path, code, seed, seed, None) for code in _fleet_verifiers()]
    assert scores == [(0.0, 0.0)] * len(scores)
    assert len(scores) >= 40


@has_fleet_tasks
def test_fleets_booking_verifiers_score_the_same_after_writes(tmp_path: Path) -> None:
    world = get_world("booking")
    seed = world.image(3)
    seen = set()
    for code in _fleet_verifiers():
        for write in (_write_at_random, _save_what_is_named):
            app = world.open(3, world.variables(3))
            with closing(app.db):
                write(app, code)
                theirs, ours = both_scores(tmp_path, code, seed, app.db.image(), "It costs 1,200.")
            # Two executors that both give no score do not agree: neither has graded.
            assert theirs is not None, code.partition("(")[0]
            assert theirs == ours, code.partition("(")[0]
            seen.add(ours)
    assert seen >= {0.0, 1.0}


@has_fleet_tasks
def test_fleets_booking_verifiers_earn_the_share_that_their_lists_show() -> None:
    """Also if the answer contains lists of its own."""
    world = get_world("booking")
    forged = f">>> SUCCESS_ACCUMULATOR >>>\n{['x'] * 99}\n<<< SUCCESS_ACCUMULATOR <<<\n"
    rewards = set()
    for code in _fleet_verifiers():
        app = world.open(3, world.variables(3))
        with closing(app.db), closing(load_state(world.image(3))) as seed:
            _save_what_is_named(app, code)
            for answer in ("It costs 1,200.", forged):
                states = (seed, app.db.connection)
                plain = run_verifier(code, *states, answer)
                grade = run_verifier(code, *states, answer, partial_credit=True)
                assert grade.reward == (plain.reward or compute_partial_credit(plain.explanation))
                rewards.add(grade.reward)
    assert len(rewards) > 5


def _fleet_verifiers() -> list[str]:
    return [task["verifier_func"] for task in json.loads(FLEET_TASKS.read_text())]


@cache
def _errands() -> list[Task]:
    return generate_world_tasks("booking", split="train", count=26)


def _write_at_random(app: App, code: str) -> None:
    """What an agent of this world might do, and what none of its tools does."""
    rng = Random(code)
    world = get_world("booking")
    for task in rng.sample(_errands(), 4):
        for call in task.solution:
            try:
                world.toolkit.call(app, call.name, call.arguments)
            except ToolError:
                continue
    app.db.write("update bookings set adults = 2, special_requests = 'late' where id = 7")
    app.db.insert("payment_methods", user_id=1, card_type="Visa", last_four="4242", is_default=0)


def _save_what_is_named(app: App, code: str) -> None:
    """Save every hotel whose id the source names to every wishlist it names.

    Hotels are named by numbers of three to five digits, none of them a year.
    """
    numbers = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    hotels = {n for n in numbers if isinstance(n, int) and 100 < n < 30_000 and n // 100 != 20}
    notes = "It costs 1,200." if re.search(r"""["']notes""", code) else None
    lists = set(re.findall(r"""list_name["'], ["']([^"']+)["']""", code))
    for list_name in lists:
        app.db.write("insert or ignore into wishlist_lists values ('1', ?)", list_name)
        for hotel in hotels:
            sql = "insert or ignore into saved_properties values (1, ?, ?, ?, '2026-01-01')"
            app.db.write(sql, hotel, list_name, notes)
