"""The history of a run that went on elsewhere: what this folder holds of another one is removed.

Two machines that resume from the same checkpoint train different weights. A machine that comes back and
downloads the other one's checkpoint must not mix its own later steps with those of the other.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.config.root import RunConfig
from skyfleet.evaluation.report import remove_reports_after
from skyfleet.storage.step_rows import parse_row, read_step
from skyfleet.trainer.journal import clear_journal
from skyfleet.trajectories.archive import remove_episodes_after

METRICS = "metrics.jsonl"
_DUMP = re.compile(r"global_step_(\d+)(_evals|\.jsonl)")


def forget_other_history(config: RunConfig, bucket: BucketCheckpoints) -> None:
    """Before a checkpoint is downloaded: remove the steps whose rows differ from those in the bucket.

    Of the journal everything goes: a record names the weights that sampled it by their number, which
    both histories use.
    """
    folder = Path(config.trainer.run_path)
    clear_journal(folder)
    if (rows := bucket.read_record(METRICS)) is None:
        return
    last_step = find_last_common_step(folder / METRICS, rows)
    remove_episodes_after(folder / "trajectories", last_step)
    remove_reports_after(folder, last_step)
    for step, path in list_dumps(Path(config.trainer.export_path)):
        if step > last_step:  # else it would be uploaded over that of the other history
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def find_last_common_step(path: Path, other: bytes) -> int:
    """The last step up to which both files have the same rows; -1 without one."""
    last_step = -1
    if not path.exists():
        return last_step
    for line, other_line in zip(path.read_bytes().splitlines(), other.splitlines(), strict=False):
        if line != other_line or (row := parse_row(line)) is None:
            break
        last_step = read_step(row)
    return last_step


def list_dumps(exports: Path) -> Iterator[tuple[int, Path]]:
    """The step of each dump of episodes, which is a folder or a file."""
    for kind in ("dumped_evals", "dumped_training_trajectories"):
        for path in sorted(exports.glob(f"{kind}/global_step_*")):
            if match := _DUMP.fullmatch(path.name):
                yield int(match[1]), path
