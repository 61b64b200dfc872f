"""The inputs and results of a run are attached to the trackers that keep files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.fakes.small_runs import small_config

from skyfleet.tracking.step_log import StepLog
from skyfleet.trainer.attachments import attach_inputs, attach_results


class FileList:
    """A tracker that keeps files."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def attach(self, name: str, text: str) -> None:
        self.files[name] = text

    def sync(self) -> None: ...

    def close(self) -> None: ...


def test_each_manifest_is_attached_once_and_generated_tasks_have_none(tmp_path: Path) -> None:
    for name in ("a", "b", "unprepared"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "manifest.json").write_text('{"source": "a"}')
    (tmp_path / "b" / "manifest.json").write_text('{"source": "b"}')
    sources = ("a/train.parquet", "b/train.jsonl", "unprepared/train.jsonl")
    config = small_config(
        tmp_path / "run",
        f"data.train_data=[{', '.join(str(tmp_path / source) for source in sources)}]",
        f"data.val_data={{val: [{tmp_path}/a/validation.parquet], other: ['world:github?count=2']}}",
        "environment.skyrl_gym.fleet_task.api_key=sk-fleet-0123456789abcdef",
    )
    tracker = FileList()
    attach_inputs(StepLog(tracker), config)
    yaml = tracker.files.pop("run_config.yaml")
    assert "train_batch_size: 2" in yaml
    assert "sk-fleet" not in yaml
    assert tracker.files == {
        "dataset_manifest.json": '{"source": "a"}',
        "dataset_manifest_2.json": '{"source": "b"}',
    }


def test_the_results_that_a_run_has_are_attached(tmp_path: Path) -> None:
    tracker = FileList()
    attach_results(StepLog(tracker), tmp_path)
    assert tracker.files == {}
    (tmp_path / "results.md").write_text("| a |")
    (tmp_path / "report.html").write_text("<p>")
    attach_results(StepLog(tracker), tmp_path)
    assert tracker.files == {"results.md": "| a |", "report.html": "<p>"}
