from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from skyfleet.checkpoints.checkpoint import Checkpoint, JsonPart, Saveable
from skyfleet.checkpoints.resume import (
    find_checkpoint,
    find_verified_checkpoint,
    load_checkpoint,
)
from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.tasks.sampling import TaskSampler
from skyfleet.tasks.task import Task


@dataclass
class Weights:
    value: str

    def save(self, folder: Path) -> None:
        (folder / "shards").mkdir()
        (folder / "shards" / "0.bin").write_text(self.value)

    def load(self, folder: Path) -> None:
        self.value = (folder / "shards" / "0.bin").read_text()


class FullDisk:
    def save(self, folder: Path) -> None:
        (folder / "partial").write_text("x" * 100)
        Path("/dev/full").write_text("x")

    def load(self, folder: Path) -> None:
        raise AssertionError


@dataclass
class Counter:
    state: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


def save(root: Path, step: int, value: str = "w", **options: Any) -> Checkpoint:
    return save_checkpoint(root, step, {"policy": Weights(value)}, **options)


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.split("_")[-1]) for path in root.glob("global_step_*"))


def latest(root: Path) -> int | None:
    checkpoint = find_checkpoint(root, "latest")
    return checkpoint.step if checkpoint else None


def test_saved_parts_are_loaded(tmp_path: Path) -> None:
    parts: dict[str, Saveable] = {
        "policy": Weights("w5"),
        "trainer": JsonPart(Counter({"step": 5, "seen": ["a"]})),
    }
    save_checkpoint(tmp_path / "runs" / "a", 5, parts)
    found = find_checkpoint(tmp_path / "runs" / "a", "latest")
    assert found is not None
    weights, counter = Weights(""), Counter()
    load_checkpoint(found, {"policy": weights, "trainer": JsonPart(counter)})
    assert weights.value == "w5"
    assert counter.state == {"step": 5, "seen": ["a"]}


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    save(tmp_path, 5, "abc")
    manifest = json.loads((tmp_path / "global_step_5" / "manifest.json").read_text())
    assert manifest == {
        "step": 5,
        "skyfleet_version": version("skyfleet"),
        "parts": ["policy"],
        "files": {
            "policy/shards/0.bin": {"size_bytes": 3, "sha256": sha256(b"abc").hexdigest()},
        },
    }
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "5"


def test_a_sampler_resumes_at_its_saved_position(tmp_path: Path) -> None:
    tasks = [Task(key=str(i), env_key="e", prompt="p") for i in range(7)]
    sampler, other = (TaskSampler(tasks, batch_size=3, seed=1) for _ in range(2))
    sampler.draw()
    load_checkpoint(
        save_checkpoint(tmp_path, 1, {"sampler": JsonPart(sampler)}), {"sampler": JsonPart(other)}
    )
    assert other.draw() == sampler.draw()


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "none", "latest") is None
    save(tmp_path, 1)
    assert find_checkpoint(tmp_path, "none") is None


def test_latest_is_the_newest_complete_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (9, 10):
        save(tmp_path, step)
    (tmp_path / "global_step_11" / "policy").mkdir(parents=True)
    shutil.copytree(tmp_path / "global_step_10", tmp_path / "global_step_12")
    (tmp_path / "global_step_12" / "policy" / "shards" / "0.bin").unlink()
    (tmp_path / ".global_step_13.draft").mkdir()
    (tmp_path / "global_step_14").mkdir()
    (tmp_path / "global_step_14" / "manifest.json").write_text('{"step": 14')
    (tmp_path / "latest_ckpt_global_step.txt").write_text("99")
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == 10
    assert len(caplog.records) == 3
    assert "global_step_11" in caplog.text
    assert "policy/shards/0.bin is missing and should have 1 bytes" in caplog.text


def test_resume_path_must_be_a_complete_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 4)
    found = find_checkpoint(tmp_path, "from_path", tmp_path / "global_step_3")
    assert found is not None
    assert found.step == 3
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: No such file .*choose a global_step"
    ):
        find_checkpoint(tmp_path, "from_path", str(tmp_path))
    with pytest.raises(ConfigError, match=r"trainer\.resume_path is not set"):
        find_checkpoint(tmp_path, "from_path")
    (tmp_path / "global_step_3" / "policy" / "shards" / "0.bin").write_text("longer")
    with pytest.raises(CheckpointError, match=r"0\.bin has 6 bytes and should have 1 bytes"):
        find_checkpoint(tmp_path, "from_path", tmp_path / "global_step_3")


def test_a_corrupt_file_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    first, second = Weights("1"), Weights("2")
    checkpoint = save_checkpoint(tmp_path, 1, {"first": first, "second": second})
    (checkpoint.folder / "second" / "shards" / "0.bin").write_text("x")
    first.value = "kept"
    with pytest.raises(CheckpointError, match=r"second/shards/0\.bin has changed"):
        load_checkpoint(checkpoint, {"first": first, "second": second})
    assert first.value == "kept"
    load_checkpoint(checkpoint, {"first": first})
    assert first.value == "1"
    (checkpoint.folder / "second" / "shards" / "0.bin").unlink()
    with pytest.raises(CheckpointError, match=r"second/shards/0\.bin cannot be read \(No such"):
        load_checkpoint(checkpoint, {"second": second})


def damage(root: Path, step: int) -> None:
    (root / f"global_step_{step}" / "policy" / "shards" / "0.bin").write_text("x")


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 9, 10):
        save(tmp_path, step)
    damage(tmp_path, 10)
    (tmp_path / "global_step_9" / "manifest.json").unlink()
    (tmp_path / "global_step_11.old").mkdir()
    with caplog.at_level(logging.WARNING):
        found = find_verified_checkpoint(tmp_path, "latest")
    assert found is not None
    assert (found.step, found.verified) == (3, True)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "resuming from global_step_3 instead"
    ] * 2
    assert "policy/shards/0.bin has changed since it was saved" in caplog.text
    with pytest.raises(CheckpointError, match=r"resume_strict=true and the newest .*has changed"):
        find_verified_checkpoint(tmp_path, "latest", strict=True)
    with pytest.raises(CheckpointError, match="has changed"):
        find_verified_checkpoint(tmp_path, "from_path", tmp_path / "global_step_10")
    damage(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"no intact checkpoint .*3 damaged.*run_name"):
        find_verified_checkpoint(tmp_path, "latest")


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no part 'critic'; it contains \['policy'\]"):
        load_checkpoint(save(tmp_path, 1), {"critic": Weights("")})


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 5, max_to_keep=1)
    parts: dict[str, Saveable] = {"policy": Weights("w"), "big": FullDisk()}
    with pytest.raises(
        CheckpointError,
        match=r"global_step_10 was not saved: .*No space left on device.*"
        r"the previous checkpoint global_step_5 is intact",
    ):
        save_checkpoint(tmp_path, 10, parts, max_to_keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step_5",
        "latest_ckpt_global_step.txt",
    ]
    assert latest(tmp_path) == 5
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "5"


def test_a_full_disk_at_the_first_checkpoint_reports_that_none_exists(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no earlier checkpoint"):
        save_checkpoint(tmp_path, 1, {"big": FullDisk()})
    assert latest(tmp_path) is None


def test_leftovers_of_a_killed_save_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".global_step_3.draft" / "policy").mkdir(parents=True)
    save(tmp_path, 4)
    assert not (tmp_path / ".global_step_3.draft").exists()


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, "old")
    weights = Weights("")
    load_checkpoint(save(tmp_path, 5, "new"), {"policy": weights})
    assert weights.value == "new"


def test_retention_keeps_the_newest_checkpoints(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, step, max_to_keep=2)
    assert steps(tmp_path) == [10, 11]
    save(tmp_path, 12)
    assert steps(tmp_path) == [10, 11, 12]


def test_retention_never_removes_a_protected_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 4, max_to_keep=1, protect=[2])
    assert steps(tmp_path) == [2, 4]


def test_retention_never_removes_the_checkpoint_just_save(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 6, max_to_keep=1)
    assert steps(tmp_path) == [6, 10]
