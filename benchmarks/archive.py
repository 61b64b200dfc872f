"""Time to write, list, filter, search and page through the episodes of a run.

Episodes have eight turns, each with a tool call and a result of a few lines, and 40 sampled and 160
prompt tokens per turn, drawn from a seeded vocabulary so that they compress like text.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from platform import machine, python_version, system
from random import Random
from statistics import median
from time import perf_counter

from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.transcript import Transcript
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.archive import EpisodeWriter, load, train_path
from skyfleet.trajectories.index import list_entries, search
from skyfleet.trajectories.trajectory import Ending, Trajectory, Turn

TURNS_PER_EPISODE = 8
EPISODES_PER_STEP = 512
SAMPLED, GIVEN = 40, 160
"""Tokens per turn."""
PAGE = 50
FEWEST_TURNS = 1000
"""Chosen so that the filter finds an episode."""
NEEDLE = "needle in the archive"

_WORDS = [
    f"{head}{tail}" for head in "bcdfghklmnprst" for tail in ("ake", "ond", "ist", "urn", "ell")
]
_ENVS = ("booking", "github", "outlook", "reddit", "zillow")


def _turn(rng: Random, *, text: str) -> Turn:
    arguments = {"query": " ".join(rng.choices(_WORDS, k=4)), "page": rng.randrange(9)}
    call = ToolCall(id="call_0", name=f"list_{rng.choice(_WORDS)}", arguments=arguments)
    lines = [f"{rng.randrange(999)},{' '.join(rng.choices(_WORDS, k=8))}" for _ in range(8)]
    return Turn(
        action=Message(role="assistant", content=text, tool_calls=(call,)),
        replies=(Message(role="tool", content="\n".join(lines), tool_call_id="call_0"),),
        reward=0.0,
        engine_seconds=rng.random(),
        env_seconds=rng.random() / 100,
    )


def _transcript(rng: Random) -> Transcript:
    n_tokens = TURNS_PER_EPISODE * (SAMPLED + GIVEN)
    # A skewed distribution, as in natural text.
    token_ids = [int(rng.paretovariate(0.6)) % 150_000 for _ in range(n_tokens)]
    loss_mask = ([False] * GIVEN + [True] * SAMPLED) * TURNS_PER_EPISODE
    # Logprobs of engines are 32-bit; a dyadic fraction prints as short in Python.
    logprobs = [-rng.getrandbits(23) / 2**22 if chosen else 0.0 for chosen in loss_mask]
    return Transcript(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        policy_versions=[0] * TURNS_PER_EPISODE,
    )


def _episodes(count: int) -> Iterator[Trajectory]:
    """Generate a few hundred episodes and repeat them under other names, because it is slow.

    gzip has a window of 32 kB, less than two episodes, so repeats do not shrink the files.
    """
    rng = Random(0)
    drawn = [
        (tuple(_turn(rng, text="") for _ in range(TURNS_PER_EPISODE)), _transcript(rng))
        for _ in range(min(count, 512))
    ]
    for number in range(count):
        turns, transcript = drawn[rng.randrange(len(drawn))]
        if number % 10_000 == 0:
            turns = (_turn(rng, text=NEEDLE), *turns[1:])
        reward = float(rng.random() < 0.3)
        yield Trajectory(
            task_key=f"task-{number // 8}",
            env_key=_ENVS[number // 8 % len(_ENVS)],
            sample=number % 8,
            prompt=(Message(role="user", content=" ".join(rng.choices(_WORDS, k=60))),),
            turns=turns,
            transcripts=(transcript,),
            ending=Ending.DONE,
            grade=Grade(reward=reward, success=reward == 1.0, explanation="checked"),
            seconds=rng.random() * 10,
        )


def _write(folder: Path, n_episodes: int) -> float:
    """Seconds spent in the archive, without generating the episodes."""
    seconds = 0.0
    episodes = _episodes(n_episodes)
    for step in range(-(-n_episodes // EPISODES_PER_STEP)):
        batch = [e for _, e in zip(range(EPISODES_PER_STEP), episodes, strict=False)]
        start = perf_counter()
        with EpisodeWriter(train_path(folder, step)) as writer:
            for episode in batch:
                writer.add(episode)
        seconds += perf_counter() - start
    return seconds


def measure(folder: Path, n_turns: int) -> dict[str, float]:
    n_episodes = n_turns // TURNS_PER_EPISODE
    figures = {"episodes": n_episodes, "write_seconds": _write(folder, n_episodes)}
    files = [path for path in folder.rglob("*") if path.is_file()]
    figures["bytes"] = sum(path.stat().st_size for path in files)
    figures["index_bytes"] = sum(p.stat().st_size for p in files if p.name.endswith(".index.jsonl"))
    start = perf_counter()
    entries = list_entries(folder)
    figures["list_seconds"] = perf_counter() - start
    start = perf_counter()
    wanted = [e for e in entries if e.env_key == "github" and e.success is False]
    figures["filter_seconds"] = perf_counter() - start
    start = perf_counter()
    found = list(search(entries, NEEDLE))
    figures["search_seconds"] = perf_counter() - start
    assert len(found) == -(-n_episodes // 10_000)
    pages = []
    for first in range(0, len(wanted) - PAGE, max(PAGE, len(wanted) // 20)):
        start = perf_counter()
        for entry in wanted[first : first + PAGE]:
            load(entry)
        pages.append(1000 * (perf_counter() - start))
    figures["filtered_episodes"] = len(wanted)
    if pages:
        figures["page_of_50_ms"] = median(pages)
    start = perf_counter()
    load(wanted[-1])
    figures["one_episode_ms"] = 1000 * (perf_counter() - start)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1_000_000)
    asked = parser.parse_args()
    if asked.turns < FEWEST_TURNS:
        parser.error(f"--turns {asked.turns}: give at least {FEWEST_TURNS}")
    folder = Path(tempfile.mkdtemp(prefix="skyfleet_archive_"))
    try:
        figures = measure(folder, asked.turns)
    finally:
        shutil.rmtree(folder)
    machine_name = f"{system()} {machine()}, Python {python_version()}, {date.today()}"
    print(f"{asked.turns:,} turns, {machine_name}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
