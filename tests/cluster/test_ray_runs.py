"""Whole runs through Ray: the numbers of one process, real kills, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fakes.small_runs import rows, small_config

from skyfleet.config.root import RunConfig
from skyfleet.trainer.assemble import GivenObjects
from skyfleet.trainer.callbacks import Callbacks, StepResult
from skyfleet.trainer.loops import train
from skyfleet.trainer.run import Run
from skyfleet.trainer.training_run import open_training_run, run_training

ray = pytest.importorskip("ray")

pytestmark = [
    # Ray leaves the handles of its own processes to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]

RAY = (
    "trainer.placement.use_ray=true",
    "generator.num_rollout_workers_per_node=1",
    "trainer.warm_start.steps=40",
    "generator.sampling_params.max_generate_length=40",
    "generator.sampling_params.stop=[]",
    # A gradient while every attempt fails: Adam would turn mere rounding into updates of full size.
    "trainer.algorithm.use_entropy_loss=true",
    "trainer.policy.optimizer_config.lr=1e-3",
)
EXIT_SECONDS = 20
"""Actors that were killed, and the daemons of Ray, end after `ray.shutdown` has returned."""
ENGINES = ("trainer.placement.colocate_all=false", "generator.num_inference_engines=2")
RANKS = (
    "trainer.placement.colocate_all=false",
    "trainer.strategy=fsdp",
    "trainer.placement.policy_num_gpus_per_node=2",
)


@pytest.fixture(autouse=True)
def _quiet_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = set(psutil.pids())
    yield
    assert not ray.is_initialized()
    deadline = time.monotonic() + EXIT_SECONDS
    while left := _find_ray_processes(set(psutil.pids()) - before):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _find_ray_processes(pids: set[int]) -> list[str]:
    names = []
    for pid in pids:
        try:
            names.append(psutil.Process(pid).name())
        except psutil.Error:
            continue
    return [name for name in names if name.startswith(("raylet", "gcs_server", "ray::"))]


def without_times(folder: Path) -> list[dict[str, Any]]:
    """Numbers that do not depend on the clock or on how requests were batched."""
    return [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(("timing/", "weight_sync/")) and "logprobs_abs_diff" not in key
        }
        for row in rows(folder)
    ]


def assert_same_rows(folder: Path, expected: Path) -> None:
    for row, other in zip(without_times(folder), without_times(expected), strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)


def train_once(folder: Path, *overrides: str) -> Path:
    asyncio.run(run_training(small_config(folder, *overrides)))
    return folder


@contextmanager
def killing(config: RunConfig, find_pid: Any) -> Iterator[list[int]]:
    """Kills a process of the run once, while it plays the episodes of its second step."""
    killed: list[int] = []

    async def play() -> None:
        async with open_training_run(config) as run:
            task = asyncio.create_task(_kill_at(run, find_pid, killed))
            await train(run)
            task.cancel()

    asyncio.run(play())
    yield killed


async def _kill_at(run: Run, find_pid: Any, killed: list[int]) -> None:
    while run.state.step < 1:  # noqa: ASYNC110 - a run has no event for it
        await asyncio.sleep(0.005)
    pid = find_pid(run)
    os.kill(pid, signal.SIGKILL)
    killed.append(pid)


def find_worker(run: Run) -> int:
    method: Any = run.rollouts.run
    return int(method.__self__._workers[0].connection.process_id)


def find_engine(run: Run) -> int:
    return int(run.inference.engines[0].process_id)  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_a_run_over_a_rollout_worker_has_the_numbers_of_one_process(tmp_path: Path) -> None:
    one = train_once(tmp_path / "one", *RAY[2:])
    assert_same_rows(train_once(tmp_path / "ray", *RAY), one)


@pytest.mark.exhaustive
@pytest.mark.parametrize("extra", [ENGINES, RANKS], ids=["engines", "ranks"])
def test_a_run_over_actors_has_the_numbers_of_one_process(
    extra: tuple[str, ...], tmp_path: Path
) -> None:
    one = train_once(tmp_path / "one", *RAY[2:])
    assert_same_rows(train_once(tmp_path / "ray", *RAY, *extra), one)


@pytest.mark.exhaustive
def test_a_learner_that_loses_a_rank_goes_on_from_its_checkpoint_and_journal(
    tmp_path: Path,
) -> None:
    one, killed = train_once(tmp_path / "one", *RAY[2:]), list[int]()

    def kill_rank(step: StepResult) -> None:
        if step.number == 1 and not killed:
            (rank, *_) = _find_actors("ray::RankActor")
            os.kill(rank, signal.SIGKILL)
            killed.append(rank)

    config = small_config(tmp_path / "ray", *RAY, *RANKS)
    given = GivenObjects(callbacks=Callbacks(on_step=kill_rank))
    asyncio.run(run_training(config, given=given))
    assert killed
    assert_same_rows(tmp_path / "ray", one)


def _find_actors(title: str) -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [c.pid for c in children if c.is_running() and "".join(c.cmdline()).startswith(title)]


CHILD = """
import asyncio, sys
from pathlib import Path
from tests.fakes.small_runs import small_config
from skyfleet.trainer.training_run import run_training
asyncio.run(run_training(small_config(Path(sys.argv[1]), *sys.argv[2:])))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_a_driver_that_ends_leaves_no_process_and_no_shared_memory_and_is_resumed(
    number: signal.Signals, tmp_path: Path
) -> None:
    steps = "trainer.max_training_steps=40"
    one = train_once(tmp_path / "one", *RAY[2:], steps)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "ray"), *RAY, *ENGINES, steps]
    before = set(os.listdir("/dev/shm"))
    driver = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    metrics, deadline = tmp_path / "ray" / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or len(rows(tmp_path / "ray")) < 4:
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(number)
    driver.wait(60)
    # Ray's agents notice by themselves that their node is gone.
    _, alive = psutil.wait_procs(children, timeout=180)
    assert alive == []
    assert set(os.listdir("/dev/shm")) <= before
    subprocess.run(command, check=True, timeout=240, stderr=subprocess.DEVNULL)
    # A step that two processes sampled differs in the last digits, which later steps amplify.
    for row, other in zip(without_times(tmp_path / "ray"), without_times(one), strict=True):
        assert row == pytest.approx(other, rel=0.05, abs=1e-3)


@pytest.mark.exhaustive
def test_two_nodes_of_which_one_goes_away_and_comes_back_train_as_one_process(
    tmp_path: Path,
) -> None:
    from ray.cluster_utils import Cluster

    one = train_once(tmp_path / "one", *RAY[2:])
    node: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=dict(node))
    try:
        lost = [cluster.add_node(**node)]
        ray.init(address=cluster.address, log_to_driver=False)
        assert len([n for n in ray.nodes() if n["Alive"]]) == 2

        def remove_or_add(step: StepResult) -> None:
            if step.number == 1:
                cluster.remove_node(lost.pop(), allow_graceful=False)
            elif step.number == 2:
                cluster.add_node(**node)

        given = GivenObjects(callbacks=Callbacks(on_step=remove_or_add))
        asyncio.run(run_training(small_config(tmp_path / "ray", *RAY), given=given))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert_same_rows(tmp_path / "ray", one)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("extra", "find_pid"),
    [((), find_worker), (ENGINES, find_engine)],
    ids=["rollout worker", "engine"],
)
def test_a_run_whose_actor_is_killed_has_the_numbers_of_one_that_was_not(
    extra: tuple[str, ...], find_pid: Any, tmp_path: Path
) -> None:
    one = train_once(tmp_path / "one", *RAY[2:])
    with killing(small_config(tmp_path / "ray", *RAY, *extra), find_pid) as killed:
        assert killed
    assert_same_rows(tmp_path / "ray", one)
