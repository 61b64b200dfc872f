"""Skeleton of a new world: writes a small working world and its test for a user to edit."""

from __future__ import annotations

import builtins
import keyword
import sys
from pathlib import Path

from skyfleet.errors import ConfigError
from skyfleet.worlds.catalog import CONVERSATION_NAMES, WORLD_NAMES

_WORLD = '''\
"""{title}: a stock of items."""

from random import Random

from skyfleet.envs.tools import ToolError
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, World, call

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
    """Set the stock of an item."""
    if app.db.row("select * from items where id = ?", id) is None:
        raise ToolError(f"no item {{id}}; list_items shows the ids")
    app.db.write("update items set stock = ? where id = ?", stock, id)


@{name}.template(difficulty=1)
def restock(app: App, rng: Random) -> TaskDraft | None:
    item, stock = rng.choice(app.db.rows("select * from items")), rng.randint(1, 99)
    if item["stock"] == stock:
        return None  # Doing nothing would pass.
    calls = [call("list_items"), call("set_stock", id=item["id"], stock=stock)]
    return TaskDraft(prompts=[f"Set the stock of {{item['name']}} to {{stock}}."], calls=calls)


@{name}.template(difficulty=1, held_out=True)
def count(app: App, rng: Random) -> TaskDraft:
    item = rng.choice(app.db.rows("select * from items"))
    return TaskDraft(
        prompts=[f"What is the stock of {{item['name']}}?"],
        calls=[call("list_items")],
        answer=str(item["stock"]),
        answer_kind="number",
    )
'''

_TEST = '''\
"""The reference solution solves every task of {name}; doing nothing solves none."""

import asyncio

from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.worlds.catalog import open_world, tasks_from_source


def test_reference_solutions_pass_and_doing_nothing_fails() -> None:
    limits = Limits(max_turns=10, max_input_length=4096, trajectory_timeout_seconds=10)
    for task in tasks_from_source("world:{name}:{name}?split=all&count=50"):
        solved = asyncio.run(run_episode(task, open_world, oracle_policy, limits))
        idle = asyncio.run(run_episode(task, open_world, null_policy, limits))
        assert (solved.reward, idle.reward) == (1.0, 0.0)
'''


_DEFINED_NAMES = frozenset({"call", "count", "fill", "list_items", "restock", "set_stock"})
"""Names that the skeleton defines: they would overwrite a world of the same name."""


def write_world(name: str, folder: Path) -> list[Path]:
    """Write `name.py` and `test_name.py` into `folder`; existing files are not overwritten."""
    paths = world_paths(name, folder)
    for path, text in zip(paths, (_WORLD, _TEST), strict=True):
        path.write_text(text.format(name=name, title=name.capitalize()))
    return paths


def world_paths(name: str, folder: Path) -> list[Path]:
    """Return the paths to write; ConfigError if the name is invalid or a file exists."""
    if not (name.isidentifier() and name.islower()):
        raise ConfigError(
            f"NAME={name!r}: a world's name is a lowercase Python identifier, such as shop"
        )
    if conflict := _find_conflict(name):
        raise ConfigError(f"NAME={name!r} is {conflict}; choose another name, such as my_{name}")
    paths = [folder / f"{name}.py", folder / f"test_{name}.py"]
    if taken := [path for path in paths if path.exists()]:
        raise ConfigError(f"NAME={name!r}: {taken[0]} already exists; choose another name")
    return paths


def _find_conflict(name: str) -> str | None:
    if keyword.iskeyword(name):
        return "a Python keyword"
    if name in (*WORLD_NAMES, *CONVERSATION_NAMES):
        return "a built-in world"
    if name in _DEFINED_NAMES:
        return "a name that the new file defines itself"
    if hasattr(builtins, name) or name in sys.stdlib_module_names or name == "skyfleet":
        return "a Python builtin or module that the new file would shadow"
    return None
