"""Regenerate the labelled episodes: `python -m tests.analysis.label_episodes`.

Scripted agents make every mistake in every built-in environment in which it is possible. The
episodes that a person labelled are in `read.jsonl.gz` and are not regenerated.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

from benchmarks.failure_classes import Labelled, write_labelled
from tests.analysis.agent_mistakes import AGENT_MISTAKES
from tests.analysis.environment_mistakes import ENVIRONMENT_MISTAKES
from tests.analysis.mistakes import Scene, Write
from tests.analysis.scripted import play

from skyfleet.analysis.failure_class import FailureClass
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Trajectory
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks

FOLDER = Path(__file__).parents[1] / "assets" / "labelled_episodes"
_PER_CLASS = {False: 24, True: 12}
"""By whether they are held out."""
_SEEDS = {False: 6, True: 7}
"""Task seeds; seeds that differ modulo four share no names."""
_TASKS = 40
_RECORDED_NAMES = {"is_reworded": "is_told_in_other_words"}
"""The labelled set keeps the names, which also seed the random numbers."""


async def labelled_episodes() -> list[Labelled]:
    """The same number of episodes per class, over its mistakes and all environments."""
    mistakes: dict[FailureClass, list[Write]] = {}
    for label, write in (*AGENT_MISTAKES, *ENVIRONMENT_MISTAKES):
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
    """The first episodes that fail as intended."""
    name = write.__qualname__.split(".")[0]
    name = _RECORDED_NAMES.get(name, name)
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
    """Without wall times, which would change the bytes of the file."""
    turns = tuple(replace(turn, engine_seconds=0.0, env_seconds=0.0) for turn in episode.turns)
    return replace(episode, turns=turns, seconds=0.0)


def _tasks(seed: int) -> list[Task]:
    """Alternates between the environments, with different templates."""
    by_world = [
        generate_world_tasks(name, split="all", count=_TASKS, seed=seed) for name in WORLD_NAMES
    ]
    return [tasks[n] for n in range(_TASKS) for tasks in by_world]


def main() -> None:
    episodes = asyncio.run(labelled_episodes())
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_labelled(FOLDER / "scripted.jsonl.gz", episodes)
    print(len(episodes), Counter(one.label.value for one in episodes))  # noqa: T201


if __name__ == "__main__":
    main()
