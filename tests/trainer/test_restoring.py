"""Which checkpoint a run with a bucket resumes from: the newest intact one, here or there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.fakes.buckets import serve_s3, use_bucket
from tests.fakes.small_runs import small_config
from tests.trajectories.making import attempt

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.checkpoints.checkpoint import Checkpoint, JsonPart
from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.config.keys import dump_yaml
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.storage.local import make_folder
from skyfleet.storage.objects import write_object
from skyfleet.tasks.task import Task
from skyfleet.trainer.dry_run import plan_dry_run
from skyfleet.trainer.group_journal import GroupJournal, RecordedBatch
from skyfleet.trainer.journal import Journal
from skyfleet.trainer.open_groups import OpenGroup, OpenGroups
from skyfleet.trainer.resuming import prepare_folders
from skyfleet.trainer.run import TrainerState
from skyfleet.trainer.run_history import list_dumps
from skyfleet.trajectories.archive import train_path, write_groups
from skyfleet.trajectories.records import encode_episode

STATE = "trainer/state.json"
TASK = Task(key="a", env_key="github", prompt="do it")


def make_config(tmp_path: Path, *overrides: str) -> RunConfig:
    bucket = f"trainer.ckpt_bucket={tmp_path}/bucket"
    return small_config(tmp_path / "run", "trainer.run_name=first", bucket, *overrides)


@pytest.fixture
def bucket(tmp_path: Path) -> BucketCheckpoints:
    return BucketCheckpoints(address=f"{tmp_path}/bucket/skyfleet/tiny/first")


def save(root: Path, step: int) -> Checkpoint:
    return save_checkpoint(root, step, {"trainer": JsonPart(TrainerState(step=step))})


def upload(bucket: BucketCheckpoints, tmp_path: Path, *steps: int) -> None:
    """As another machine did, which is gone."""
    for step in steps:
        bucket.upload(save(tmp_path / "gone", step))


def resume(config: RunConfig) -> int | None:
    found = prepare_folders(config)
    return None if found is None else found.step


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [((), (), None), ((), (1, 2), 2), ((1,), (1, 2), 2), ((1, 3), (1, 2), 3), ((2,), (2,), 2)],
)
def test_a_run_resumes_from_the_newest_here_or_in_the_bucket(
    bucket: BucketCheckpoints,
    tmp_path: Path,
    local: tuple[int, ...],
    remote: tuple[int, ...],
    expected: int | None,
) -> None:
    config = make_config(tmp_path)
    upload(bucket, tmp_path, *remote)
    for step in local:
        save(Path(config.trainer.ckpt_path), step)
    assert resume(config) == expected


async def record(folder: Path, step: int, *, asynchronous: bool) -> None:
    """Record an episode of `step`, sampled by the weights of the step before it."""
    journal = Journal(folder=folder / "journal", run_id="both")
    episode = attempt(1.0, task_key="a")
    if not asynchronous:
        with journal.open_step(step, policy_version=step - 1) as segment:
            segment.add(0, 0, episode, encode_episode(episode))
        return
    groups = GroupJournal.extend_journal(journal, open_groups())
    groups.add(make_group(step), step - 1, episode, encode_episode(episode))
    await groups.add_batch(step, RecordedBatch(step - 1, (0,)))
    groups.close()


def open_groups() -> OpenGroups:
    return OpenGroups([TASK], batch_size=1, max_staleness_steps=1, total_steps=9)


def has_episodes(run: Path, step: int) -> bool:
    return train_path(run / "trajectories", step).exists()


def make_group(draw: int) -> OpenGroup:
    return OpenGroup(number=draw - 1, task=TASK)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_machine_that_comes_back_uses_nothing_of_steps_that_another_one_ran_again(
    bucket: BucketCheckpoints, tmp_path: Path, asynchronous: bool
) -> None:
    # Both resumed from checkpoint 2; the other one has uploaded its step 3, this one had sampled step 4.
    config = make_config(tmp_path)
    run, exports = Path(config.trainer.run_path), Path(config.trainer.export_path)
    save(Path(config.trainer.ckpt_path), 2)
    await record(run, 4, asynchronous=asynchronous)
    for step in (1, 2, 3, 4):
        write_groups(train_path(run / "trajectories", step), [])
        make_folder(exports / "dumped_evals" / f"global_step_{step}_evals")
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "own": {n}}}\n' for n in range(4)))
    assert resume(config) == 2
    assert list((run / "journal").glob("*")), "nothing newer was downloaded"

    upload(bucket, tmp_path, 2, 3)
    rows = [b'{"step": 0, "own": 0}', b'{"step": 1, "own": 1}', b'{"step": 2, "own": 2}']
    write_object(f"{bucket.address}/run/metrics.jsonl", b"\n".join([*rows, b'{"step": 3}', b""]))
    assert resume(config) == 3
    journal = Journal(folder=run / "journal", run_id="both", checkpoint_step=3)
    if asynchronous:
        groups = GroupJournal.extend_journal(journal, open_groups())
        assert groups.read_batches(3) == {}
        assert groups.read_draw([make_group(4)]) == {}
    assert journal.open_step(4, policy_version=3).records == {}
    assert [has_episodes(run, step) for step in (1, 2, 3, 4)] == [True, True, False, False]
    assert [step for step, _ in list_dumps(exports)] == [1, 2]


@pytest.mark.parametrize("place", ["here", "in the bucket"])
def test_a_damaged_newest_checkpoint_is_replaced_or_skipped(
    bucket: BucketCheckpoints, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path)
    root = Path(config.trainer.ckpt_path)
    upload(bucket, tmp_path, 1, 2)
    if place == "here":
        damaged = save(root, 2).folder / STATE
    else:
        damaged = tmp_path / "bucket" / "skyfleet" / "tiny" / "first" / "global_step_2" / STATE
    damaged.write_bytes(b"?" * damaged.stat().st_size)
    with caplog.at_level(logging.WARNING):
        assert resume(config) == (2 if place == "here" else 1)
    assert "has changed since it was" in caplog.text


def test_with_resume_strict_a_damaged_checkpoint_in_the_bucket_is_an_error(
    bucket: BucketCheckpoints, tmp_path: Path
) -> None:
    upload(bucket, tmp_path, 1, 2)
    (tmp_path / "bucket" / "skyfleet" / "tiny" / "first" / "global_step_2" / STATE).unlink()
    with pytest.raises(CheckpointError, match=r"resume_strict=true and the newest .* is missing"):
        prepare_folders(make_config(tmp_path, "trainer.resume_strict=true"))


def test_a_checkpoint_at_an_address_is_downloaded_to_resume_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serve_s3() as endpoint:
        other = BucketCheckpoints(
            address=f"{use_bucket(monkeypatch, endpoint, 'elsewhere')}/another/run"
        )
        upload(other, tmp_path, 3, 4)

        def config_for(name: str) -> RunConfig:
            path = f"trainer.resume_path={other.address}/{name}"
            return small_config(tmp_path / "run", "trainer.resume_mode=from_path", path)

        plan = plan_dry_run(config_for("global_step_3"))
        assert plan.problems == []
        assert f"would download {other.address}/global_step_3 and resume from it" in plan.steps
        assert "0 of 3 steps of 2 x 4 = 8 episodes" in plan.steps
        assert not (tmp_path / "run").exists()
        assert resume(config_for("global_step_3")) == 3
        assert resume(config_for("global_step_3")) == 3, "it is not downloaded again"
        with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
            prepare_folders(config_for("global_step_9"))
        with pytest.raises(ConfigError, match="name a global_step_N folder"):
            prepare_folders(config_for("policy"))


def test_the_bucket_of_another_configuration_is_refused_before_anything_is_written(
    bucket: BucketCheckpoints, tmp_path: Path
) -> None:
    upload(bucket, tmp_path, 1)
    started = make_config(tmp_path, "trainer.seed=7")
    (tmp_path / "config.yaml").write_text(dump_yaml(started))
    bucket.upload_records(tmp_path, ["config.yaml"])
    with pytest.raises(ConfigError, match=r"tiny/first was started with trainer\.seed=7"):
        prepare_folders(make_config(tmp_path))
    assert not (tmp_path / "run").exists()
    moved = small_config(
        tmp_path / "moved",
        *("trainer.run_name=first", f"trainer.ckpt_bucket={tmp_path}/bucket", "trainer.seed=7"),
    )
    assert resume(moved) == 1
    assert "moved" in (tmp_path / "moved" / "config.yaml").read_text()
    assert resume(moved) == 1, "the restored config.yaml names this folder"


def test_a_dry_run_names_what_would_be_downloaded(
    bucket: BucketCheckpoints, tmp_path: Path
) -> None:
    upload(bucket, tmp_path, 1, 2)
    plan = plan_dry_run(make_config(tmp_path))
    assert f"would download {bucket.step_address(2)} and resume from it" in plan.steps
    assert not (tmp_path / "run").exists()
