"""A killed run takes the episodes after its checkpoint from its journal, and learns the same."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.crash_runs import SETTINGS, UncertainWorld, describe_run, list_differences
from tests.fakes.moody_world import MoodyWorld
from tests.trajectories.making import attempt

from skyfleet.checkpoints.checkpoint import Checkpoint, Manifest
from skyfleet.config.loading import load_config
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError, NoLearningSignalError
from skyfleet.tasks.task import Grade, Task
from skyfleet.trainer.assemble import GivenObjects
from skyfleet.trainer.callbacks import Callbacks
from skyfleet.trainer.journal import Journal, StepJournal, choose_run_id
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.archive import read_trajectories
from skyfleet.trajectories.journal_segment import Place, read_segment
from skyfleet.trajectories.records import encode_episode
from skyfleet.trajectories.trajectory import Trajectory
from skyfleet.worlds.catalog import get_world

TASKS = [Task(key=key, env_key="github", prompt="do it") for key in ("a", "b")]


def make_journal(folder: Path, **settings: Any) -> Journal:
    return Journal(folder=folder / "journal", run_id="this run", **settings)


async def record(journal: StepJournal, *places: Place) -> None:
    with journal:
        for batch, group, sample in places:
            episode = replace(attempt(1.0, task_key=TASKS[group].key), sample=sample)
            journal.add(batch, group, episode, encode_episode(episode))
        await journal.sync()


def restore(journal: StepJournal, *, batch: int = 0) -> set[tuple[str, int]]:
    return set(journal.restore(batch, TASKS, n_samples=2))


def list_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in (folder / "journal").glob("*"))


async def test_a_step_restores_its_own_episodes_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = [Place(0, 1, 0), Place(0, 0, 1), Place(1, 0, 0)]
    await record(make_journal(tmp_path).open_step(3, policy_version=2), *recorded)
    again = make_journal(tmp_path).open_step(3, policy_version=2)
    assert restore(again) == {("b", 0), ("a", 1)}
    assert restore(again, batch=1) == {("a", 0)}
    assert again.restore(0, TASKS[::-1], n_samples=2) == {}, "other prompts were drawn"
    assert caplog.text == ""
    other_run = replace(make_journal(tmp_path), run_id="another run")
    for other in (
        make_journal(tmp_path).open_step(3, policy_version=5),
        other_run.open_step(3, policy_version=2),
    ):
        assert restore(other) == set()
    assert "3 episodes are of another run or were sampled by other weights" in caplog.text


async def test_a_step_that_plays_again_removes_what_was_recorded_after_it(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    for step in (1, 2, 3):
        await record(journal.open_step(step, policy_version=0), Place(0, 0, 0))
    restore(journal.open_step(2, policy_version=0))
    assert list_steps(tmp_path) == [1, 2, 3], "nothing was played"
    await record(journal.open_step(2, policy_version=0), Place(0, 0, 1))
    assert list_steps(tmp_path) == [1, 2]
    assert restore(journal.open_step(2, policy_version=0)) == {("a", 0), ("a", 1)}


async def test_the_steps_since_the_checkpoint_before_the_newest_are_kept(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    for step in range(9):
        if step:
            await record(journal.open_step(step, policy_version=0), Place(0, 0, 0))
        if step % 3 == 0:
            journal.follow_checkpoint(step)
    assert list_steps(tmp_path) == [4, 5, 6, 7, 8], "a damaged checkpoint 6 leaves 3"
    resumed = make_journal(tmp_path, checkpoint_step=6)
    resumed.follow_checkpoint(6)
    assert list_steps(tmp_path) == [4, 5, 6, 7, 8]
    resumed.follow_checkpoint(9)
    assert list_steps(tmp_path) == [7, 8]


async def test_a_damaged_record_is_played_again_unless_resuming_is_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await record(
        make_journal(tmp_path).open_step(1, policy_version=0), Place(0, 0, 0), Place(0, 1, 0)
    )
    path = tmp_path / "journal" / "step_000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"do it", b"do_it", 1))
    assert restore(make_journal(tmp_path).open_step(1, policy_version=0)) == {("b", 0)}
    assert f"{path} line 1: the checksum is wrong" in caplog.text
    with pytest.raises(CheckpointError, match=r"resume_strict=true .*step_000001.jsonl line 1"):
        make_journal(tmp_path, is_strict=True).open_step(1, policy_version=0)


async def test_without_a_journal_nothing_is_recorded_and_nothing_old_is_used(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        await record(make_journal(tmp_path).open_step(step, policy_version=0), Place(0, 0, 0))
    off = make_journal(tmp_path, is_on=False).open_step(1, policy_version=0)
    assert restore(off) == set()
    await record(off, Place(0, 0, 0))
    assert list_steps(tmp_path) == []


def test_only_a_fork_of_another_run_changes_the_identity(tmp_path: Path) -> None:
    def checkpoint(folder: Path, version: str = "1") -> Checkpoint:
        manifest = Manifest(step=2, skyfleet_version=version, parts=(), files={})
        return Checkpoint(folder=folder / "global_step_2", manifest=manifest)

    own, other = tmp_path / "own", tmp_path / "other"
    assert choose_run_id("", None, own) != choose_run_id("", None, own)
    assert choose_run_id("saved", checkpoint(own), own) == "saved"
    fork = choose_run_id("saved", checkpoint(other), own)
    assert fork == choose_run_id("saved", checkpoint(other), own), "a killed fork resumes as itself"
    assert len({"saved", fork, choose_run_id("saved", checkpoint(other, "2"), own)}) == 3


N_EPISODES = 8
"""Per step: 2 tasks, 4 attempts each."""


@dataclass
class Watched:
    """Counts openings of environments, and copies the run folder at chosen moments, as a kill would leave it."""

    folder: Path
    copy_after: Sequence[int] = ()
    world: type[MoodyWorld] = UncertainWorld
    n_opened: int = 0
    n_finished: int = 0
    copies: dict[int, Path] = field(default_factory=dict)

    async def open_env(self, task: Task) -> Any:
        self.n_opened += 1
        return self.world(get_world(task.env_key), task)

    def finish(self, episode: Trajectory) -> None:
        self.n_finished += 1
        if self.n_finished in self.copy_after:
            copied = self.copies[self.n_finished] = self.folder.parent / f"{self.n_finished}"
            shutil.copytree(self.folder, copied)

    def run(self, *overrides: str) -> None:
        given = GivenObjects(open_env=self.open_env, callbacks=Callbacks(on_episode=self.finish))
        asyncio.run(run_training(config(self.folder, *overrides), given=given))


def config(folder: Path, *overrides: str) -> RunConfig:
    short = ("trainer.max_training_steps=3", "trainer.ckpt_interval=-1", "trainer.eval_interval=-1")
    more = ("data.val_data=[]", "trainer.hf_save_interval=-1", "trainer.warm_start.steps=0")
    return load_config(SETTINGS, [*short, *more, f"trainer.run_path={folder}/run", *overrides])


def resume(copied: Path, original: Path, *overrides: str) -> Watched:
    path = copied / "run" / "config.yaml"
    path.write_text(path.read_text().replace(str(original), str(copied)))
    resumed = Watched(copied)
    resumed.run(*overrides)
    return resumed


def list_episodes(folder: Path) -> dict[str, list[tuple[str, int, tuple[tuple[int, ...], ...]]]]:
    """By step: task, sample and tokens, sorted."""
    return {
        path.name: sorted(
            (one.task_key, one.sample, tuple(tuple(t.token_ids) for t in one.transcripts))
            for one in read_trajectories(path)
        )
        for path in folder.glob("run/trajectories/train/*.jsonl.gz")
    }


def list_places(folder: Path) -> dict[str, list[Place]]:
    def fail(damage: str) -> None:
        raise AssertionError(damage)

    return {
        path.stem: sorted(record.place for record in read_segment(path, fail))
        for path in folder.glob("run/journal/*.jsonl")
    }


def test_a_killed_run_plays_only_unfinished_episodes_and_learns_each_once(tmp_path: Path) -> None:
    """Killed within the rollouts of step 2, and after them."""
    straight = Watched(tmp_path / "straight", copy_after=(13, 16, 17))
    straight.run()
    assert straight.n_finished == 3 * N_EPISODES
    places = list_places(straight.folder)
    assert places.keys() == {"step_000001", "step_000002", "step_000003"}
    for listed in places.values():
        assert listed == [Place(0, group, sample) for group in (0, 1) for sample in range(4)]

    # All of step 2 had been played: the same weights to the bit.
    killed = straight.copies[16]
    assert resume(killed, straight.folder).n_opened == N_EPISODES
    assert list_differences(describe_run(straight.folder), describe_run(killed)) == []
    assert list_places(killed) == places

    # Three episodes of step 2 are sampled again: in a smaller batch, which may round differently.
    killed = straight.copies[13]
    assert resume(killed, straight.folder).n_opened == 3 + N_EPISODES
    assert list_places(killed) == places
    assert (
        list_episodes(killed)["step_000002.jsonl.gz"]
        == (list_episodes(straight.folder)["step_000002.jsonl.gz"])
    )

    # Episodes that were graded by other code are played again.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UncertainWorld, "grade", MoodyWorld.grade)
        assert resume(straight.copies[17], straight.folder).n_opened == 3 * N_EPISODES


async def grade_nothing(world: MoodyWorld) -> Grade:
    return Grade(reward=0.0, success=False)


def test_rollouts_that_stop_the_run_are_not_used_again(tmp_path: Path) -> None:
    one_batch = "trainer.algorithm.dynamic_sampling={type: filter, max_sample_batches: 1}"
    run = Watched(tmp_path / "here", world=MoodyWorld)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoodyWorld, "grade", grade_nothing)
        with pytest.raises(NoLearningSignalError):
            run.run(one_batch)
    assert run.n_finished == N_EPISODES
    assert list_places(run.folder) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("interval", [-1, 1])
@pytest.mark.parametrize(
    "algorithm",
    [
        (),
        ("trainer.algorithm.dynamic_sampling.type=filter", "trainer.train_batch_size=3"),
        ("trainer.algorithm.dynamic_sampling={type: replace, min_replace_ratio: 0.7}",),
        ("trainer.curriculum=true", "trainer.algorithm.zero_variance_filter=true"),
    ],
)
def test_no_prompt_is_lost_or_doubled_wherever_rollouts_are_cut(
    tmp_path: Path, algorithm: tuple[str, ...], interval: int
) -> None:
    overrides = (*algorithm, f"trainer.ckpt_interval={interval}")
    straight = Watched(tmp_path / "straight", copy_after=range(1, 200, 5))
    straight.run(*overrides)
    expected = list_episodes(straight.folder)
    for n_finished, killed in straight.copies.items():
        resumed = resume(killed, straight.folder, *overrides)
        assert resumed.n_opened == straight.n_finished - n_finished
        found = list_episodes(killed)
        for step, episodes in expected.items():
            assert [e[:2] for e in found[step]] == [e[:2] for e in episodes]
        for places in list_places(killed).values():
            assert len(places) == len(set(places))
        shutil.rmtree(killed)
