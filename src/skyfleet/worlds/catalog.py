"""Catalog: the worlds that ship with skyfleet, and as many tasks of theirs as you like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import count as counting
from itertools import islice
from random import Random
from typing import Literal, get_args
from urllib.parse import parse_qsl

from skyfleet.config.imports import import_named
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task
from skyfleet.worlds.booking import booking
from skyfleet.worlds.task_generation import two_errands
from skyfleet.worlds.dropbox import dropbox
from skyfleet.worlds.env import WorldEnv
from skyfleet.worlds.fira import fira
from skyfleet.worlds.github import github
from skyfleet.worlds.google_maps import google_maps
from skyfleet.worlds.hubspot import hubspot
from skyfleet.worlds.outlook import outlook
from skyfleet.worlds.reddit import reddit
from skyfleet.worlds.task_generation import draw_task
from skyfleet.worlds.ticketmaster import ticketmaster
from skyfleet.worlds.vocabulary import FAMILIES
from skyfleet.worlds.world import Template, World
from skyfleet.worlds.zillow import zillow

WorldSplit = Literal["train", "unseen_tasks", "unseen_templates", "all"]

WORLDS = (
    booking,
    github,
    outlook,
    reddit,
    ticketmaster,
    zillow,
    hubspot,
    dropbox,
    fira,
    google_maps,
)
WORLD_NAMES = tuple(world.name for world in WORLDS)
_known = {world.name: world for world in WORLDS}
"""By name: those above, and whatever this process was told of."""

_OPTIONS = ("split", "count", "seed", "max_difficulty")
_MOST_TASKS = 20_000
"""A task is drawn in some milliseconds: more at once would look like a hang."""
_TRAIN_PERCENT = 80
_MISSES = 200
"""After so many draws in a row that gave nothing new, a template counts as used up."""


def get_world(name: str) -> World:
    if name not in _known:
        raise ConfigError(f"world {name!r} is unknown; {_nearest(name, tuple(_known))}")
    return _known[name]


def add_world(target: str, *, key: str) -> World:
    """A world of your own, `module:name`. From now on its tasks are opened like all others.

    Only what a person wrote comes here, never a task's row: to import is to run.
    """
    world = import_named(target, key=key)
    if not isinstance(world, World):
        raise ConfigError(f"{key}={target!r} is {world!r:.60}; name a World")
    if _known.setdefault(world.name, world) is not world:
        raise ConfigError(f"{key}={target!r}: there is a world {world.name!r} already; rename it")
    return world


async def open_world(task: Task) -> WorldEnv:
    """The env of any task whose `env_key` names a world."""
    return WorldEnv(get_world(task.env_key), task)


async def open_world_for_parts(task: Task) -> WorldEnv:
    """The same with partial credit."""
    return WorldEnv(get_world(task.env_key), task, partial_credit=True)


def world_tasks(
    name: str, *, split: WorldSplit, count: int, seed: int = 0, max_difficulty: int = 3
) -> list[Task]:
    """The first `count` tasks of a world's split, its templates in rotation.

    What is wished and how it is done decide the side of train and unseen_tasks, whatever the data
    and the seed: no wish with the same solution is on both. Seeds that differ modulo four also
    share no names: see `wording.Names`.
    """
    world = get_world(name)
    streams = [
        _stream(world, template, split, seed)
        for template in _templates(world)
        if template.difficulty <= max_difficulty
        and (split == "all" or template.held_out == (split == "unseen_templates"))
    ]
    tasks = list(islice(_in_turn(streams), count))
    if len(tasks) < count:
        raise ConfigError(f"world {name!r}: count={count}, but split={split} has {len(tasks)}")
    return tasks


def _templates(world: World) -> list[Template]:
    return [*world.templates, *filter(None, [two_errands(world)])]


def tasks_from_source(source: str) -> list[Task]:
    """The tasks that an address names: `world:github?split=train&count=400&seed=0`.

    `world:shop:shop?...` is the world `shop` of your own module `shop`.
    """
    address, _, query = source.partition("?")
    scheme, _, name = address.partition(":")
    if scheme != "world":
        raise ConfigError(f"{source!r} names no world; write world:<name>?split=train&count=400")
    if ":" in name:
        name = add_world(name, key="world").name
    defaults = {"split": "train", "seed": "0", "max_difficulty": "3"}
    options = defaults | dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ConfigError(
            f"{source!r}: {unknown[0]!r} is unknown; {_nearest(unknown[0], _OPTIONS)}"
        )
    splits = get_args(WorldSplit)
    split = next((known for known in splits if known == options["split"]), None)
    if split is None:
        raise ConfigError(
            f"{source!r}: split={options['split']!r}; {_nearest(options['split'], splits)}"
        )
    return world_tasks(
        name,
        split=split,
        count=_natural(source, "count", options.get("count", ""), least=1, most=_MOST_TASKS),
        seed=_natural(source, "seed", options["seed"], least=0),
        max_difficulty=_natural(source, "max_difficulty", options["max_difficulty"], least=1),
    )


def _stream(world: World, template: Template, split: WorldSplit, seed: int) -> Iterator[Task]:
    seen: set[str] = set()

    def wanted(key: str, wish: str) -> bool:
        if key in seen:
            return False
        bucket = int(wish, 16) % 100
        if split in ("train", "unseen_tasks"):
            return (bucket < _TRAIN_PERCENT) == (split == "train")
        return True

    misses = 0
    for draw in counting():
        rng = Random(f"{world.name}/{template.name}/{seed}/{draw}")
        task = draw_task(world, template, rng, wanted, family=seed % FAMILIES)
        misses = misses + 1 if task is None else 0
        if misses > _MISSES:
            return
        if task is not None:
            seen.add(task.key)
            yield task


def _in_turn(streams: Sequence[Iterator[Task]]) -> Iterator[Task]:
    """One of each in rotation, until all are used up."""
    waiting = list(streams)
    while waiting:
        for stream in tuple(waiting):
            task = next(stream, None)
            if task is None:
                waiting.remove(stream)
            else:
                yield task


def _natural(source: str, key: str, text: str, *, least: int, most: int | None = None) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:20]) >= least):
        raise ConfigError(f"{source!r}: {key}={text!r}; write a whole number from {least} up")
    if most is not None and int(text[:20]) > most:
        raise ConfigError(f"{source!r}: {key}={text[:20]}; at most {most:,}, more by another seed")
    return int(text)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
