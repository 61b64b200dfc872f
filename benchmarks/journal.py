"""Measure what the journal of a training step costs: seconds and bytes, beside the step's.

`python -m benchmarks.journal` from the repository's root, on the disk where runs are stored
(`--folder`). `synthetic` is one step of long episodes; `tiny` trains the preset for a few steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import fmean
from time import perf_counter

from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.transcript import Transcript
from skyfleet.config.loading import load_config_file
from skyfleet.tasks.task import Grade, Task
from skyfleet.trainer.journal import Journal
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.records import encode_episode
from skyfleet.trajectories.trajectory import Ending, Trajectory, Turn

TURNS, VOCABULARY = 16, 150_000
GROUP_SIZE = 8


def make_episode(rng: Random, task: Task, sample: int, n_tokens: int) -> Trajectory:
    """Half of the tokens are sampled, in `TURNS` turns."""
    span = n_tokens // TURNS // 2
    mask = ([False] * span + [True] * span) * TURNS
    call = ToolCall(id="0", name="search", arguments={"query": "x" * span * 2})
    turn = Turn(
        action=Message(role="assistant", content="I search. " * 4, tool_calls=(call,)),
        replies=(Message(role="tool", content="y" * span * 4, tool_call_id="0"),),
        reward=0.0,
        engine_seconds=1.0,
    )
    return Trajectory(
        task_key=task.key,
        env_key=task.env_key,
        sample=sample,
        prompt=(Message(role="user", content="do it"),),
        turns=(turn,) * TURNS,
        transcripts=(
            Transcript(
                token_ids=[rng.randrange(VOCABULARY) for _ in mask],
                loss_mask=mask,
                # Engines return 32-bit values.
                logprobs=[-rng.getrandbits(23) / 2**22 if own else 0.0 for own in mask],
                policy_versions=[6] * TURNS,
            ),
        ),
        ending=Ending.DONE,
        grade=Grade(reward=1.0, success=True),
        seconds=60.0,
    )


async def measure_step(folder: Path, n_episodes: int, n_tokens: int) -> dict[str, float]:
    rng = Random(0)
    tasks = [
        Task(key=f"task-{group}", env_key="github", prompt="do it")
        for group in range(n_episodes // GROUP_SIZE)
    ]
    journal = Journal(folder=folder / "journal", run_id="0" * 32)
    encode_seconds, n_bytes = 0.0, 0
    with journal.open_step(7, policy_version=6) as step:
        for group, task in enumerate(tasks):
            for sample in range(GROUP_SIZE):
                episode = make_episode(rng, task, sample, n_tokens)
                start = perf_counter()
                line = encode_episode(episode)
                encode_seconds += perf_counter() - start
                n_bytes += len(line)
                step.add(0, group, episode, line)
        before_sync = step.seconds
        await step.sync()
    start = perf_counter()
    restored = journal.open_step(7, policy_version=6).restore(0, tasks, GROUP_SIZE)
    read_seconds = perf_counter() - start
    assert len(restored) == n_episodes
    return {
        "episodes": n_episodes,
        "tokens": n_episodes * n_tokens,
        "megabytes": n_bytes / 1e6,
        "seconds to encode, for the archive and the journal": encode_seconds,
        "seconds to hash and write": before_sync,
        "seconds to sync": step.seconds - before_sync,
        "seconds to read after a kill": read_seconds,
    }


async def measure_tiny(folder: Path, n_steps: int) -> Iterator[dict[str, float]]:
    overrides = [
        f"trainer.run_path={folder}/tiny",
        f"trainer.max_training_steps={n_steps}",
        *("trainer.eval_interval=-1", "trainer.eval_before_train=false"),
        "trainer.warm_start.steps=100",
    ]
    await run_training(load_config_file("tiny", overrides))
    lines = (folder / "tiny" / "timing.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return ({k.removeprefix("timing/"): v for k, v in row.items()} for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["synthetic", "tiny"])
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="journal_benchmark_") as temporary:
        folder = Path(temporary)
        if asked.what == "synthetic":
            figures = asyncio.run(measure_step(folder, asked.episodes, asked.tokens))
        else:
            steps = [
                row for row in asyncio.run(measure_tiny(folder, asked.steps)) if "journal" in row
            ]
            figures = {name: fmean(row[name] for row in steps) for name in ("step", "journal")}
            figures["share"] = figures["journal"] / figures["step"]
    print(json.dumps({name: round(value, 5) for name, value in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
