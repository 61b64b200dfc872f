"""The ranks of a learner answer together; one that dies, hangs or fails is one clear error."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.fakes.rank_group import FakeWorker, open_store, serve_fake_rank

from skyfleet.config.loading import load_config
from skyfleet.errors import ConfigError, LearnerLostError
from skyfleet.learner import rank_process, torchrun
from skyfleet.learner.rank_layout import build_layout
from skyfleet.learner.rank_store import RankPlace
from skyfleet.learner.torchrun import TorchrunGroup
from skyfleet.trainer.sharded_run import check_ranks

Start = Callable[..., TorchrunGroup]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    with _starting(monkeypatch) as started:
        yield started


@contextmanager
def _starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(rank_process, "RankWorker", FakeWorker)
    monkeypatch.setattr(torchrun, "_GRACE_SECONDS", 0.5)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fakes.sharded_cases", "tests.fakes.rank_group"])
    processes: list[Any] = []
    groups: list[TorchrunGroup] = []
    store, address = open_store()

    def start(n_ranks: int, *overrides: str) -> TorchrunGroup:
        def place(rank: int) -> RankPlace:
            return RankPlace(rank=rank, world_size=n_ranks, address=address, store_is_open=True)

        for rank in range(1, n_ranks):
            process = context.Process(target=serve_fake_rank, args=(place(rank),), daemon=True)
            process.start()
            processes.append(process)
        config = load_config("", list(overrides))
        groups.append(TorchrunGroup(config, place(0), policy="tiny", total_steps=1))
        return groups[-1]

    try:
        yield start
    finally:
        for group in groups:
            group.close()
        for process in processes:
            process.join(10)
            ended = process.exitcode is not None
            process.kill()
            assert ended, "a rank outlived its group"
        del store


def test_every_rank_runs_a_call_and_rank_0_answers(start: Start) -> None:
    group = start(3)
    assert group.call("step", {}) == "answer of rank 0"
    assert list(group.iterate("named_weights")) == [("first", 0), ("second", 0)]
    # A caller that stops reading leaves the ranks ready for the next call.
    assert next(iter(group.iterate("named_weights"))) == ("first", 0)
    assert group.call("step", {}) == "answer of rank 0"


def test_a_rank_that_dies_is_named_and_ends_the_group(start: Start) -> None:
    group = start(3)
    with pytest.raises(
        LearnerLostError, match=r"^rank 2 of the learner died; run the same command"
    ):
        group.call("step", {2: "die"})
    with pytest.raises(LearnerLostError, match="rank 2 of the learner died"):
        group.call("step", {})


def test_a_rank_that_dies_between_calls_is_seen_by_the_next(start: Start) -> None:
    group = start(2)
    with pytest.raises(LearnerLostError, match="rank 1 of the learner died"):
        group.call("step", {1: "die"})


def test_a_rank_that_died_is_reported_although_others_wait_for_it(start: Start) -> None:
    group = start(2)
    begin = time.monotonic()
    with pytest.raises(LearnerLostError, match="rank 1 of the learner died"):
        group.call("step", {0: "hang", 1: "die"})
    assert time.monotonic() - begin < 60


def test_a_rank_that_hangs_is_lost_at_the_deadline(start: Start) -> None:
    group = start(2, "trainer.placement.rank_timeout_seconds=1.5")
    with pytest.raises(
        LearnerLostError, match=r"rank 1 of the learner has not finished step in 1\.5 seconds"
    ):
        group.call("step", {1: "hang"})
    for process in multiprocessing.active_children():  # as torchrun does when rank 0 ends
        process.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_a_rank_is_raised_as_it_is(start: Start, rank: int) -> None:
    group = start(2)
    with pytest.raises(ValueError, match=f"rank {rank} failed"):
        group.call("step", {rank: "fail"})


@pytest.mark.parametrize("failing", [0, 1])
def test_an_update_that_fails_on_one_rank_is_raised_while_the_others_wait(
    start: Start, failing: int
) -> None:
    group = start(2)
    with pytest.raises(ValueError, match=f"rank {failing} failed"):
        group.call("step", {failing: "report", 1 - failing: "hang"})
    for process in multiprocessing.active_children():
        process.kill()


def test_an_update_that_fails_on_every_rank_is_reported_and_leaves_the_group(start: Start) -> None:
    group = start(2)
    reply = group.call("step", {0: "report", 1: "report"})
    assert str(reply.error) == "rank 0 failed"
    assert group.call("step", {}) == "answer of rank 0"


def test_one_rank_needs_no_other_process(start: Start) -> None:
    assert start(1).call("step", {}) == "answer of rank 0"


def test_layouts_follow_the_configuration() -> None:
    keys = ("tensor_parallel_size=2", "sequence_parallel_size=2", "fsdp_config.fsdp_size=4")
    config = load_config("", [f"trainer.policy.{key}" for key in keys])
    layout = build_layout(config, 16)
    assert layout.dimensions == (2, 2, 2, 2)
    assert build_layout(load_config(), 3).dimensions == (1, 3, 1, 1)


@pytest.mark.parametrize(
    ("overrides", "world_size", "sentence"),
    [
        (["tensor_parallel_size=2"], 3, "does not divide the 3 ranks of the learner"),
        (["sequence_parallel_size=4"], 2, "does not divide the 2 ranks of the learner"),
        (["fsdp_config.fsdp_size=3"], 4, "fsdp_size=3 does not divide the 4 ranks"),
        (["fsdp_config.fsdp_size=2", "sequence_parallel_size=4"], 4, "is no multiple of"),
    ],
)
def test_ranks_that_cannot_be_divided_are_one_sentence(
    overrides: list[str], world_size: int, sentence: str
) -> None:
    config = load_config("", [f"trainer.policy.{override}" for override in overrides])
    with pytest.raises(ConfigError, match=sentence):
        build_layout(config, world_size)


def test_ranks_without_fsdp_and_other_numbers_than_placed_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun started 2; set trainer\.strategy=fsdp"):
        check_ranks(load_config())
    placed = ["trainer.strategy=fsdp", "trainer.placement.policy_num_gpus_per_node=8"]
    with pytest.raises(ConfigError, match="=8, and torchrun started 2 ranks; start 8"):
        check_ranks(load_config("", placed))
    check_ranks(load_config("", placed[:1]))
