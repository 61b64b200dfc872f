from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.tracking.tensorboard import TensorboardTracker
from skyfleet.tracking.tracker import Tracker, make_trackers
from skyfleet.tracking.wandb import WandbTracker


def made(folder: Path, *names: str, resume_step: int | None = None) -> list[Tracker]:
    return make_trackers(
        names,
        run_folder=folder,
        run_name="r",
        project_name="p",
        config={"lr": 1e-6},
        resume_step=resume_step,
    )


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_names_become_trackers_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trackers = made(tmp_path, "jsonl", "console")
    for tracker in trackers:
        tracker.log({"reward/avg_raw_reward": 0.5}, 1)
        tracker.close()
    row = {"step": 1, "reward/avg_raw_reward": 0.5}
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == row
    assert capsys.readouterr().out == "step 1  reward 0.500\n"


def test_an_unknown_name_is_refused_before_a_file_is_touched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.logger='wandbb'; choose from \['console', "):
        made(tmp_path, "jsonl", "wandbb")
    assert list(tmp_path.iterdir()) == []


def test_an_absent_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingExtraError, match=r"\.\[wandb\]"):
        made(tmp_path, "jsonl", "tensorboard", "wandb")
    with pytest.raises(MissingExtraError, match=r"\.\[tensorboard\]"):
        made(tmp_path, "jsonl", "tensorboard")
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_forgets_what_came_after_the_resumed_step(tmp_path: Path) -> None:
    first = TensorboardTracker(tmp_path, resume_step=None)
    for step in (1, 2, 3):
        first.log({"reward/all": step / 4}, step)
    first.close()
    resumed = TensorboardTracker(tmp_path, resume_step=1)
    resumed.log({"reward/all": 8.0}, 2)
    resumed.close()
    assert scalars(tmp_path, "reward/all") == [(1, 0.25), (2, 8.0)]


@pytest.fixture
def fresh_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """wandb reads the environment once a process."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_keeps_a_run_in_the_folder_when_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(tmp_path, project_name="p", run_name="r", config={"lr": 1e-6})
    tracker.log({"reward/all": 0.123456}, 7)
    tracker.close()
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # Another process writes the file, and on a busy machine is not done when `finish` returns.
    for _ in range(100):
        if b"0.123456" in record.read_bytes():
            break
        time.sleep(0.1)
    assert b"reward/all" in record.read_bytes()
    assert b"0.123456" in record.read_bytes()


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_without_a_login_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"trainer\.logger='wandb': .*WANDB_MODE=offline"):
        made(tmp_path / "runs" / "run", "console", "jsonl", "tensorboard", "wandb")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fresh_wandb")
def test_what_another_put_into_the_folder_while_wandb_asked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def refuses(*_: object, dir: Path, **__: object) -> None:
        (dir / "wandb").mkdir()
        (dir / "metrics.jsonl").write_text("{}")
        raise wandb.Error("no login.")

    monkeypatch.setattr(wandb, "init", refuses)
    with pytest.raises(ConfigError, match="no login"):
        made(tmp_path / "run", "wandb")
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "metrics.jsonl"]
