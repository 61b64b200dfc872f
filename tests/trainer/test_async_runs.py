"""Asynchronous runs: the synchronous numbers at staleness 0, bounds, kills, errors and evaluations."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.fakes.moody_world import open_moody

from skyfleet.chat.message import Message
from skyfleet.config.loading import load_config
from skyfleet.config.root import RunConfig
from skyfleet.envs import registry
from skyfleet.envs.env import Env, Step
from skyfleet.errors import NoLearningSignalError
from skyfleet.tasks.task import Task
from skyfleet.trainer.assemble import GivenObjects
from skyfleet.trainer.callbacks import Callbacks, StepResult
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.archive import read_trajectories
from skyfleet.worlds.catalog import tasks_from_source

SETTINGS = """
data:
  train_data: ["world:github?split=train&count=4"]
  val_data: {unseen: ["world:github?split=unseen_tasks&count=2"]}
trainer:
  device: cpu
  bf16: false
  policy:
    model: {path: tiny}
    model_config_kwargs:
      {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 1,
        num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 1100, vocab_size: 300}
    optimizer_config: {lr: 1.0e-2}
  algorithm: {use_kl_loss: false}
  fully_async: {enabled: true, max_staleness_steps: 2, num_parallel_generation_workers: 3}
  train_batch_size: 2
  policy_mini_batch_size: 2
  max_tokens_per_microbatch: 2048
  max_training_steps: 4
  eval_interval: -1
  eval_before_train: false
  ckpt_interval: -1
generator:
  n_samples_per_prompt: 4
  max_turns: 3
  max_input_length: 1000
  sampling_params: {max_generate_length: 6, stop: [a, e]}
  eval_sampling_params: {max_generate_length: 6, stop: [a, e]}
  max_num_seqs: 16
"""
SYNCHRONOUS = "trainer.fully_async.enabled=false"
VARYING = ("async/groups_in_flight", "async/groups_waiting")
"""Depend on when things happen."""


@pytest.fixture(autouse=True)
def _moody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards differ within a group, so every step changes the weights."""
    monkeypatch.setitem(registry.ENV_CLASSES, "world", lambda _: open_moody)


def configure(folder: Path, *overrides: str) -> RunConfig:
    return load_config(SETTINGS, [f"trainer.run_path={folder}", *overrides])


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_varying(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in VARYING} for row in rows]


def read_weights(folder: Path, step: int) -> dict[str, list[float]]:
    path = folder / f"checkpoints/global_step_{step}/policy/model.safetensors"
    return {name: weight.flatten().tolist() for name, weight in load_file(path).items()}


def read_batches(folder: Path) -> dict[int, list[int]]:
    """By step: the groups that it was trained on, as the journal has them."""
    path = folder / "journal" / "batches.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line)["record"] for line in lines]
    return {record["step"]: record["groups"] for record in records}


def list_numbers(folder: Path) -> list[int]:
    return sorted(number for numbers in read_batches(folder).values() for number in numbers)


async def test_staleness_0_gives_the_weights_metrics_and_evaluations_of_the_synchronous_loop(
    tmp_path: Path,
) -> None:
    more = ("trainer.max_training_steps=3", "trainer.eval_interval=2")
    synchronous, asynchronous = tmp_path / "synchronous", tmp_path / "asynchronous"
    await run_training(configure(synchronous, SYNCHRONOUS, *more))
    staleness = "trainer.fully_async.max_staleness_steps=0"
    workers = "trainer.fully_async.num_parallel_generation_workers=2"
    await run_training(configure(asynchronous, staleness, workers, *more))
    assert read_weights(synchronous, 3) == read_weights(asynchronous, 3)
    known = read_rows(asynchronous)
    asynchronous_keys = {key for row in known for key in row if key.startswith("async/")}
    assert "async/staleness_max" in asynchronous_keys
    for row in known:
        assert not any(row.pop(key, 0) for key in asynchronous_keys)
    assert read_rows(synchronous) == known
    reports = [
        sorted(path.name for path in (folder / "reports").rglob("*.json"))
        for folder in (synchronous, asynchronous)
    ]
    assert reports[0] == reports[1]


class Gate:
    """Holds environments back until as many training steps are done as their task asks for."""

    def __init__(self) -> None:
        self.steps_done = 0
        self.waiting: list[asyncio.Event] = []

    async def wait_for(self, steps: int) -> None:
        while self.steps_done < steps:
            event = asyncio.Event()
            self.waiting.append(event)
            await event.wait()

    def finish_step(self, _: StepResult) -> None:
        self.steps_done += 1
        for event in self.waiting:
            event.set()
        self.waiting.clear()


def hold_back(gate: Gate, long_keys: set[str]) -> Callable[[Task], Any]:
    """Environments of which some wait, after the first turn, for the end of a training step."""
    opened: set[str] = set()

    async def open_env(task: Task) -> Env:
        env: Any = await open_moody(task)
        take_step, begun = env.step, gate.steps_done
        # The tokenizer of the tiny policy is built from an episode of each task.
        is_held = task.key in long_keys and task.key in opened
        opened.add(task.key)

        async def step(action: Message) -> Step:
            taken: Step = await take_step(action)
            if is_held:
                await gate.wait_for(begun + 1)
            return taken

        env.step = step
        opened_env: Env = env
        return opened_env

    return open_env


async def test_long_episodes_span_updates_are_bounded_and_as_frequent_as_they_were_started(
    tmp_path: Path,
) -> None:
    """Two of eight tasks are long: they take as long as a training step."""
    gate, seen = Gate(), list[StepResult]()
    source = "world:github?split=train&count=8"
    long_keys = {task.key for task in tasks_from_source(source)[:2]}

    def end_step(step: StepResult) -> None:
        seen.append(step)
        gate.finish_step(step)

    given = GivenObjects(open_env=hold_back(gate, long_keys), callbacks=Callbacks(on_step=end_step))
    workers = "trainer.fully_async.num_parallel_generation_workers=6"
    # Long episodes must not take every place in the engine: a step waits for short ones.
    more = (
        "generator.max_num_seqs=32",
        f"data.train_data=['{source}']",
        workers,
        "trainer.max_training_steps=8",
    )
    await run_training(configure(tmp_path, *more), given=given)
    rows = read_rows(tmp_path)[1:]
    assert max(row["async/staleness_max"] for row in rows) == 2, "the bound, reached"
    assert any(row["async/mixed_version_episodes"] for row in rows), "over a weight sync"
    assert not any(row.get("sentinel/policy_version") for row in rows)
    trained = [group.task_key for step in seen for group in step.groups]
    # Every started group is trained on, so each of the eight tasks comes as often as it was drawn.
    assert sorted(trained.count(key) for key in set(trained)) == [2] * 8
    assert list_numbers(tmp_path) == list(range(16))
    for episode in read_trajectories(tmp_path / "trajectories/train/step_000008.jsonl.gz"):
        for transcript in episode.transcripts:
            assert transcript.count_tokens_by_version().total() == sum(transcript.loss_mask)


async def test_an_interrupted_or_failed_run_loses_no_group_and_trains_none_twice(
    tmp_path: Path,
) -> None:
    calls: list[int] = []

    def fail_once(step: StepResult) -> None:
        calls.append(step.number)
        if calls.count(2) == 1 and step.number == 2:
            raise RuntimeError("a bug in a callback")

    given = GivenObjects(callbacks=Callbacks(on_step=fail_once))
    with pytest.raises(RuntimeError, match="a bug in a callback"):
        await run_training(configure(tmp_path), given=given)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "no episode runs on"
    task = asyncio.create_task(run_training(configure(tmp_path)))
    while 3 not in read_batches(tmp_path):  # noqa: ASYNC110 - another process could write it
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await run_training(configure(tmp_path))
    assert [row["step"] for row in read_rows(tmp_path)] == [0, 1, 2, 3, 4]
    state = json.loads((tmp_path / "checkpoints/global_step_4/trainer/state.json").read_text())
    assert state["open_groups"] == {"next_number": 8, "n_replaced": 0, "groups": []}
    tasks = [
        episode.task_key
        for step in range(1, 5)
        for episode in read_trajectories(tmp_path / f"trajectories/train/step_00000{step}.jsonl.gz")
    ]
    assert sorted(tasks.count(key) for key in set(tasks)) == [8, 8, 8, 8], "twice 4 attempts each"


@pytest.mark.exhaustive
async def test_groups_without_a_signal_are_replaced_until_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refill = "trainer.fully_async.sample_full_batch=true"
    await run_training(configure(tmp_path / "some", refill))
    for row in read_rows(tmp_path / "some")[1:]:
        assert (
            row["filter/zero_variance"] + row["filter/too_few_graded"]
            == (row["async/groups_replaced"])
        )
    monkeypatch.setattr(
        "tests.fakes.moody_world.MoodyWorld.letters", property(lambda _: 0, lambda *_: None)
    )
    with pytest.raises(NoLearningSignalError, match="sample_full_batch=true replaced 4 groups"):
        await run_training(
            configure(
                tmp_path / "none", refill, "trainer.algorithm.dynamic_sampling.max_sample_batches=2"
            )
        )


def start_child(folder: Path, *overrides: str) -> int:
    """Fork a run from this process, which has imported torch already; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (folder / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log):
            asyncio.run(run_training(configure(folder, *overrides)))
        code = 0
    finally:
        os._exit(code)


def kill_when(child: int, is_time: Callable[[], bool]) -> None:
    while not is_time():
        if os.waitpid(child, os.WNOHANG)[0]:
            return  # it has ended
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_killed_run_repeats_its_steps_from_the_journal_and_goes_on(tmp_path: Path) -> None:
    kill_when(start_child(tmp_path), lambda: 3 in read_batches(tmp_path))
    before, batches = read_rows(tmp_path), read_batches(tmp_path)
    assert len(before) >= 3, "it was killed in or after step 3"
    asyncio.run(run_training(configure(tmp_path)))
    after = read_rows(tmp_path)
    assert [row["step"] for row in after] == [0, 1, 2, 3, 4]
    assert without_varying(after)[: len(before)] == without_varying(before), "the same numbers"
    assert {step: read_batches(tmp_path)[step] for step in batches} == batches
    assert list_numbers(tmp_path) == list(range(8)), "none lost, none twice"


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_any_number_of_kills_loses_no_group_and_trains_none_twice(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    overrides = (
        f"trainer.ckpt_interval={rng.choice((-1, 1, 2))}",
        f"trainer.fully_async.max_staleness_steps={rng.choice((1, 2, 2))}",
        f"trainer.fully_async.sample_full_batch={str(rng.random() < 0.3).lower()}",
        "trainer.max_ckpts_to_keep=-1",
        "trainer.max_training_steps=8",
        f"trainer.journal={str(rng.random() < 0.8).lower()}",
    )
    trained: dict[int, list[str]] = {}
    for _ in range(3):
        at, places = rng.randint(1, 12), ("journal/step_*", "trajectories/train/step_*")

        def is_time(at: int = at, places: tuple[str, str] = places) -> bool:
            if "journal=true" not in overrides[-1]:
                return len(list(tmp_path.glob(places[1]))) >= at // 2
            try:
                files = [path.read_bytes() for path in tmp_path.glob(places[0])]
            except FileNotFoundError:  # a checkpoint made it superfluous
                return False
            return sum(file.count(b"\n") for file in files) >= 4 * at

        kill_when(start_child(tmp_path, *overrides), is_time)
    assert os.waitpid(start_child(tmp_path, *overrides), 0)[1] == 0
    assert [row["step"] for row in read_rows(tmp_path)] == list(range(9))
    state = json.loads((tmp_path / "checkpoints/global_step_8/trainer/state.json").read_text())
    left = state["open_groups"]
    for step in range(1, 9):
        path = tmp_path / f"trajectories/train/step_00000{step}.jsonl.gz"
        trained[step] = [episode.task_key for episode in read_trajectories(path)]
    n_trained = sum(map(len, trained.values())) // 4
    assert n_trained + len(left["groups"]) == left["next_number"], "each drawn group once"
    assert n_trained == 16 + left["n_replaced"]
    shutil.rmtree(tmp_path / "checkpoints")
