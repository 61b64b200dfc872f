"""Plays the labelled episodes again: `python -m tests.analysis.label_episodes`.

Scripted agents make every mistake in every world that has room for it. The episodes that a person
read and labelled are kept as they are in `read.jsonl.gz`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

from benchmarks.failure_classes import Labelled, write_labelled
from tests.analysis.mistakes import Scene, Write
from tests.analysis.mistakes_of_agents import AGENT_MISTAKES
from tests.analysis.mistakes_of_others import OTHERS_MISTAKES
from tests.analysis.scripted import play

from skyfleet.analysis.failure_class import FailureClass
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Trajectory
from skyfleet.worlds.catalog import WORLD_NAMES, world_tasks

FOLDER = Path(__file__).parents[1] / "assets" / "labelled_episodes"
_PER_CLASS = {False: 24, True: 12}
"""By whether they are held out."""
_SEEDS = {False: 6, True: 7}
"""Of the tasks; what differs modulo four shares no names."""
_TASKS = 40


async def labelled_episodes() -> list[Labelled]:
    """Of each class as many as of any other, its mistakes and the worlds in turn."""
    mistakes: dict[FailureClass, list[Write]] = {}
    for label, write in (*AGENT_MISTAKES, *OTHERS_MISTAKES):
        mistakes.setdefault(label, []).append(write)
    episodes: list[Labelled] = []
    for held_out in (False, True):
        tasks = _tasks(_SEEDS[held_out])
        for label, writes in mistakes.items():
            for n, write in enumerate(writes):
                wanted = (_PER_CLASS[held_out] + n) // len(writes)
                episodes += await _episodes(label, write, tasks, wanted, held_out=held_out)
    return episodes


async def _episodes(
    label: FailureClass, write: Write, tasks: list[Task], wanted: int, *, held_out: bool
) -> list[Labelled]:
    """The first that come out as meant."""
    name = write.__qualname__.split(".")[0]
    found: list[Labelled] = []
    for number, task in enumerate(tasks):
        rng = Random(f"{label}/{name}/{number}")
        script = write(Scene(task=task, rng=rng, held_out=held_out))
        episode = await play(script) if script else None
        if episode is not None:
            one = Labelled(label=label, mistake=name, held_out=held_out, episode=_untimed(episode))
            found.append(one)
        if len(found) == wanted:
            break
    return found


def _untimed(episode: Trajectory) -> Trajectory:
    """Wall times differ from run to run, and would make every playing other bytes."""
    turns = tuple(replace(turn, engine_seconds=0.0, env_seconds=0.0) for turn in episode.turns)
    return replace(episode, turns=turns, seconds=0.0)


def _tasks(seed: int) -> list[Task]:
    """World by world in turn, other templates each time."""
    by_world = [world_tasks(name, split="all", count=_TASKS, seed=seed) for name in WORLD_NAMES]
    return [tasks[n] for n in range(_TASKS) for tasks in by_world]


def main() -> None:
    episodes = asyncio.run(labelled_episodes())
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_labelled(FOLDER / "scripted.jsonl.gz", episodes)
    print(len(episodes), Counter(one.label.value for one in episodes))  # noqa: T201


if __name__ == "__main__":
    main()
