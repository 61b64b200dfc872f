"""Skeleton: a small world that works, and its test, to be rewritten into your own."""

from __future__ import annotations

import builtins
import keyword
import sys
from pathlib import Path

from skyfleet.errors import ConfigError
from skyfleet.worlds.catalog import WORLD_NAMES

_WORLD = '''\
"""{title}: items and how many there are of each."""

from random import Random

from skyfleet.envs.tools import ToolError
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import Draft, World, call

{name} = World("{name}", "create table items (id integer primary key, name text, stock integer)")
NAMES = ("apple", "bread", "candle", "drum", "egg", "flute", "glass", "hammer")


@{name}.seeder
def fill(app: App, rng: Random) -> None:
    for item in rng.sample(NAMES, 5):
        app.db.insert("items", name=item, stock=rng.randint(1, 99))


@{name}.reads
def list_items(app: App) -> list[dict[str, object]]:
    """List all items."""
    return app.db.rows("select name, id, stock from items")


@{name}.writes
def set_stock(app: App, id: int, stock: int) -> None:
    """Say how many there are."""
    if app.db.row("select * from items where id = ?", id) is None:
        raise ToolError(f"no item {{id}}; list_items shows the ids")
    app.db.write("update items set stock = ? where id = ?", stock, id)


@{name}.template(difficulty=1)
def restock(app: App, rng: Random) -> Draft | None:
    item, stock = rng.choice(app.db.rows("select * from items")), rng.randint(1, 99)
    if item["stock"] == stock:
        return None  # doing nothing would pass
    calls = [call("list_items"), call("set_stock", id=item["id"], stock=stock)]
    return Draft(prompts=[f"There are {{stock}} of {{item['name']}} now. Note it."], calls=calls)


@{name}.template(difficulty=1, held_out=True)
def count(app: App, rng: Random) -> Draft:
    item = rng.choice(app.db.rows("select * from items"))
    prompts, answer = [f"How many of {{item['name']}} are there?"], str(item["stock"])
    return Draft(prompts=prompts, calls=[call("list_items")], answer=answer, answer_kind="number")
'''

_TEST = '''\
"""Every task of {name} is done by its solution, and not by doing nothing."""

import asyncio

from skyfleet.worlds.catalog import open_world, tasks_from_source
from skyfleet.rollouts.episode import run_episode
from skyfleet.rollouts.episode import Limits
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy


def test_solutions_pass_and_doing_nothing_does_not() -> None:
    limits = Limits(max_turns=10, max_input_length=4096, trajectory_timeout_seconds=10)
    for task in tasks_from_source("world:{name}:{name}?split=all&count=50"):
        solved = asyncio.run(run_episode(task, open_world, oracle_policy, limits))
        idle = asyncio.run(run_episode(task, open_world, null_policy, limits))
        assert (solved.reward, idle.reward) == (1.0, 0.0)
'''


_OWN = frozenset({"call", "count", "fill", "list_items", "restock", "set_stock"})
"""What the skeleton itself defines: a world of that name would be overwritten by it."""


def write_world(name: str, folder: Path) -> list[Path]:
    """`name.py` and `test_name.py` in `folder`; nothing that exists is overwritten."""
    paths = world_paths(name, folder)
    for path, text in zip(paths, (_WORLD, _TEST), strict=True):
        path.write_text(text.format(name=name, title=name.capitalize()))
    return paths


def world_paths(name: str, folder: Path) -> list[Path]:
    """What would be written; ConfigError where it could not be."""
    if not (name.isidentifier() and name.islower()):
        raise ConfigError(f"NAME={name!r}: a world is a Python name in small letters, such as shop")
    if taken_by := _taken_by(name):
        raise ConfigError(f"NAME={name!r} is {taken_by}; choose another name, such as my_{name}")
    paths = [folder / f"{name}.py", folder / f"test_{name}.py"]
    if taken := [path for path in paths if path.exists()]:
        raise ConfigError(f"NAME={name!r}: {taken[0]} exists already; choose another name")
    return paths


def _taken_by(name: str) -> str | None:
    if keyword.iskeyword(name):
        return "a word of Python's own"
    if name in WORLD_NAMES:
        return "a world that ships with skyfleet"
    if name in _OWN:
        return "a name that the new file defines itself"
    if hasattr(builtins, name) or name in sys.stdlib_module_names or name == "skyfleet":
        return "a name that the new file would hide from Python"
    return None
