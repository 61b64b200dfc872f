"""Catalog of worlds: look one up by name, register your own, generate tasks of a split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import count as count_up
from itertools import islice
from random import Random
from typing import Literal, get_args
from urllib.parse import parse_qsl

from skyfleet.config.environment import Verifier
from skyfleet.config.imports import import_named
from skyfleet.envs.users.user import UserFactory
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task
from skyfleet.worlds.booking import booking
from skyfleet.worlds.conversations.doordash.templates import doordash
from skyfleet.worlds.conversations.env import ConversationEnv, make_scripted_user
from skyfleet.worlds.conversations.healthcare.templates import healthcare
from skyfleet.worlds.conversations.telecom.templates import telecom
from skyfleet.worlds.conversations.world import ConversationWorld
from skyfleet.worlds.dropbox import dropbox
from skyfleet.worlds.env import WorldEnv
from skyfleet.worlds.fira import fira
from skyfleet.worlds.github import github
from skyfleet.worlds.google_maps import google_maps
from skyfleet.worlds.hubspot import hubspot
from skyfleet.worlds.outlook import outlook
from skyfleet.worlds.reddit import reddit
from skyfleet.worlds.task_generation import compose_two, generate_task
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
CONVERSATIONS = (telecom, healthcare, doordash)
"""Worlds in which the agent talks with a simulated user."""
CONVERSATION_NAMES = tuple(world.name for world in CONVERSATIONS)
_known: dict[str, World] = {world.name: world for world in (*WORLDS, *CONVERSATIONS)}
"""By name: the built-in worlds and those that `add_world` registered in this process."""

_OPTIONS = ("split", "count", "seed", "max_difficulty")
_MAX_TASKS = 20_000
"""Generating a task takes milliseconds: a larger count would look like a hang."""
_TRAIN_PERCENT = 80
_MAX_MISSES = 200
"""A template is exhausted after this many consecutive draws without a new task."""


def get_world(name: str) -> World:
    if name not in _known:
        raise ConfigError(f"world {name!r} is unknown; {_nearest(name, tuple(_known))}")
    return _known[name]


def add_world(target: str, *, key: str) -> World:
    """Import and register a user's world, `module:name`; its tasks then open like built-in ones.

    Never pass a value from a task row: importing a module runs its code.
    """
    world = import_named(target, key=key)
    if not isinstance(world, World):
        raise ConfigError(f"{key}={target!r} is {world!r:.60}, not a World; name a World object")
    if _known.setdefault(world.name, world) is not world:
        raise ConfigError(
            f"{key}={target!r}: a world named {world.name!r} is already registered; rename it"
        )
    return world


async def open_world(
    task: Task,
    *,
    partial_credit: bool = False,
    verifier: Verifier | None = None,
    make_user: UserFactory = make_scripted_user,
) -> WorldEnv:
    """Open the env of a task whose `env_key` names a world; a conversation has a user."""
    world = get_world(task.env_key)
    if isinstance(world, ConversationWorld):
        return ConversationEnv(
            world, task, make_user=make_user, partial_credit=partial_credit, verifier=verifier
        )
    return WorldEnv(world, task, partial_credit=partial_credit, verifier=verifier)


def generate_world_tasks(
    name: str, *, split: WorldSplit, count: int, seed: int = 0, max_difficulty: int = 3
) -> list[Task]:
    """Generate the first `count` tasks of a world's split, templates in round-robin order.

    A hash of prompt and solution decides between train and unseen_tasks, whatever the data and the
    seed: no prompt with the same solution is in both. Seeds that differ modulo four also share no
    names: see `vocabulary.Names`.
    """
    world = get_world(name)
    streams = [
        _stream(world, template, split, seed)
        for template in _templates(world)
        if template.difficulty <= max_difficulty
        and (split == "all" or template.held_out == (split == "unseen_templates"))
    ]
    tasks = list(islice(_round_robin(streams), count))
    if len(tasks) < count:
        raise ConfigError(
            f"world {name!r}: count={count}, but split={split} has {len(tasks)} tasks; lower count"
        )
    return tasks


def _templates(world: World) -> list[Template]:
    return [*world.templates, *filter(None, [compose_two(world)])]


def tasks_from_source(source: str) -> list[Task]:
    """Generate the tasks of an address: `world:github?split=train&count=400&seed=0`.

    `world:shop:shop?...` is the world `shop` of the user's module `shop`.
    """
    address, _, query = source.partition("?")
    scheme, _, name = address.partition(":")
    if scheme != "world":
        raise ConfigError(
            f"{source!r} is not a world address; write world:<name>?split=train&count=400"
        )
    if ":" in name:
        name = add_world(name, key="world").name
    get_world(name)  # an unknown name is the mistake to report first
    defaults = {"split": "train", "seed": "0", "max_difficulty": "3"}
    options = defaults | dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ConfigError(
            f"{source!r}: {unknown[0]!r} is unknown; {_nearest(unknown[0], _OPTIONS)}"
        )
    if not options.get("count"):
        example = f"{address}?{query}&count=100" if query and "count" not in options else ""
        raise ConfigError(
            f"{source!r}: count is missing: write {example or f'{address}?count=100'}"
        )
    splits = get_args(WorldSplit)
    split = next((known for known in splits if known == options["split"]), None)
    if split is None:
        raise ConfigError(
            f"{source!r}: split={options['split']!r}; {_nearest(options['split'], splits)}"
        )
    return generate_world_tasks(
        name,
        split=split,
        count=_parse_count(
            source, "count", options.get("count", ""), at_least=1, at_most=_MAX_TASKS
        ),
        seed=_parse_count(source, "seed", options["seed"], at_least=0),
        max_difficulty=_parse_count(
            source, "max_difficulty", options["max_difficulty"], at_least=1
        ),
    )


def _stream(world: World, template: Template, split: WorldSplit, seed: int) -> Iterator[Task]:
    seen: set[str] = set()

    def is_wanted(key: str, content_hash: str) -> bool:
        if key in seen:
            return False
        bucket = int(content_hash, 16) % 100
        if split in ("train", "unseen_tasks"):
            return (bucket < _TRAIN_PERCENT) == (split == "train")
        return True

    misses = 0
    for draw in count_up():
        rng = Random(f"{world.name}/{template.name}/{seed}/{draw}")
        task = generate_task(world, template, rng, is_wanted, family=seed % FAMILIES)
        misses = misses + 1 if task is None else 0
        if misses > _MAX_MISSES:
            return
        if task is not None:
            seen.add(task.key)
            yield task


def _round_robin(streams: Sequence[Iterator[Task]]) -> Iterator[Task]:
    """One task per stream in turn, until all streams are exhausted."""
    waiting = list(streams)
    while waiting:
        for stream in tuple(waiting):
            task = next(stream, None)
            if task is None:
                waiting.remove(stream)
            else:
                yield task


def _parse_count(
    source: str, key: str, text: str, *, at_least: int, at_most: int | None = None
) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:20]) >= at_least):
        raise ConfigError(
            f"{source!r}: {key}={text!r}; write a whole number of at least {at_least}"
        )
    if at_most is not None and int(text[:20]) > at_most:
        raise ConfigError(
            f"{source!r}: {key}={text[:20]} is above the limit of {at_most:,}; "
            "generate more with another seed"
        )
    return int(text)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
