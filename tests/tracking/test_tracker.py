from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.tracking.jsonl_tracker import JsonlTracker
from skyfleet.tracking.tensorboard_tracker import TensorboardTracker
from skyfleet.tracking.tracker import Tracker, make_trackers
from skyfleet.tracking.wandb_file import read_wandb_file
from skyfleet.tracking.wandb_tracker import WandbTracker


def make(folder: Path, *names: str, resume_step: int | None = None) -> list[Tracker]:
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


def test_trackers_are_built_in_the_order_of_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trackers = make(tmp_path, "jsonl", "console")
    for tracker in trackers:
        tracker.log({"reward/avg_raw_reward": 0.5}, 1)
        tracker.close()
    row = {"step": 1, "reward/avg_raw_reward": 0.5}
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == row
    assert capsys.readouterr().out == "step 1  reward 0.500\n"


def test_an_unknown_name_raises_before_a_file_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.logger='wandbb'; choose from \['console', "):
        make(tmp_path, "jsonl", "wandbb")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingExtraError, match=r"\.\[wandb\]"):
        make(tmp_path, "jsonl", "tensorboard", "wandb")
    with pytest.raises(MissingExtraError, match=r"\.\[tensorboard\]"):
        make(tmp_path, "jsonl", "tensorboard")
    assert list(tmp_path.iterdir()) == []


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def write_rows(folder: Path, steps: range, *, resume_step: int | None = None) -> None:
    tracker = JsonlTracker(folder, resume_step=resume_step)
    for step in steps:
        tracker.log({"reward": step / 10, "timing/step": 0.5}, step)
    tracker.close()


def test_a_metrics_row_is_sorted_and_exact_and_timings_have_their_own_file(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "run", resume_step=None)
    tracker.log({"b": 0.1 + 0.2, "timing/learn": 1.5, "a": 3, "timing/a": 2.0}, 7)
    # Flushed: readable before the tracker closes.
    assert lines(tmp_path / "run" / "metrics.jsonl") == [
        '{"step": 7, "a": 3.0, "b": 0.30000000000000004}'
    ]
    assert lines(tmp_path / "run" / "timing.jsonl") == [
        '{"step": 7, "timing/a": 2.0, "timing/learn": 1.5}'
    ]
    tracker.close()


def test_the_files_of_a_resumed_run_equal_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    write_rows(tmp_path / "whole", range(1, 7))
    write_rows(tmp_path / "resumed", range(1, 6))
    write_rows(tmp_path / "resumed", range(4, 7), resume_step=3)
    for name in ("metrics.jsonl", "timing.jsonl"):
        whole, resumed = tmp_path / "whole" / name, tmp_path / "resumed" / name
        assert whole.read_bytes() == resumed.read_bytes()


def test_an_incomplete_last_line_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        write_rows(tmp_path, range(3, 5), resume_step=3)
    assert [json.loads(line)["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert "dropped an incomplete line" in caplog.text


def test_a_new_run_overwrites_the_files(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4))
    write_rows(tmp_path, range(1, 2))
    assert lines(tmp_path / "metrics.jsonl") == ['{"step": 1, "reward": 0.1}']


def test_nan_and_infinity_are_written_as_null_and_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = JsonlTracker(tmp_path, resume_step=None)
    with caplog.at_level(logging.WARNING):
        tracker.log({"kl": math.nan, "loss": math.inf}, 1)
        tracker.log({"kl": -math.inf}, 2)
    tracker.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        '{"step": 1, "kl": null, "loss": null}',
        '{"step": 2, "kl": null}',
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "step 1: kl is nan and is written as null; further cases are not reported"
    ]


def test_the_means_of_a_step_without_learning_signal_are_null_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = JsonlTracker(tmp_path, resume_step=None)
    tracker.log({"loss/avg_raw_advantages": math.nan, "train/avg_reward": math.nan}, 1)
    assert lines(tmp_path / "metrics.jsonl") == [
        '{"step": 1, "loss/avg_raw_advantages": null, "train/avg_reward": null}'
    ]
    assert caplog.records == []
    tracker.log({"loss/avg_raw_rewards": math.inf}, 2)
    tracker.close()
    assert "step 2: loss/avg_raw_rewards is inf" in caplog.text


def test_tensorboard_in_another_folder_gets_the_rows_before_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward/all": 0.25, "loss/a": null}\n{"step": 2, "reward/all": 0.5}\n'
    )
    for resumed_to in (2, 3):  # the second time its own rows are there already
        (tracker,) = make(tmp_path, "tensorboard", resume_step=resumed_to - 1)
        tracker.log({"reward/all": 8.0}, resumed_to)
        tracker.close()
    assert scalars(tmp_path / "tensorboard", "reward/all") == [(1, 0.25), (2, 8.0), (3, 8.0)]


def test_tensorboard_discards_events_after_the_resumed_step(tmp_path: Path) -> None:
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
    """wandb reads the environment once per process."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_writes_rows_and_the_end_of_the_run_into_its_folder_when_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    for state in ("finished", "failed"):
        folder = tmp_path / state
        tracker = WandbTracker(folder, project_name="p", run_name="r", config={"lr": 1e-6})
        tracker.log({"reward/all": 0.123456}, 7)
        tracker.finish(state)
        tracker.close()
    wandb.teardown()  # waits for the process that writes the files
    for state in ("finished", "failed"):
        (path,) = (tmp_path / state).glob("wandb/offline-run-*/run-*.wandb")
        run = read_wandb_file(path)
        assert [row["reward/all"] for row in run.rows] == [0.123456]
        assert run.is_finished is (state == "finished")


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_without_a_login_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"trainer\.logger='wandb': .*WANDB_MODE=offline"):
        make(tmp_path / "runs" / "run", "console", "jsonl", "tensorboard", "wandb")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fresh_wandb")
def test_a_failed_wandb_login_keeps_files_of_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def fail(*_: object, dir: Path, **__: object) -> None:
        (dir / "wandb").mkdir()
        (dir / "metrics.jsonl").write_text("{}")
        raise wandb.errors.UsageError("no login.")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(ConfigError, match="no login"):
        make(tmp_path / "run", "wandb")
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "metrics.jsonl"]
