"""TrajectoryUploads: copy evaluation dumps, episodes and records to `trainer.trajectory_bucket`.

`{bucket}/evals/{run}/global_step_N/{env}.jsonl` and `aggregated_results.jsonl` are SkyRL's dumps, with
the run's `report.html` beside them at the end,
`{bucket}/training/{run}/global_step_N.jsonl` those of training, if they are written, and
`{bucket}/runs/{run}/…` is the run's folder: configuration, metrics, reports and episodes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from skyfleet.analysis.missing_episodes import find_missing_episodes
from skyfleet.analysis.run_folder import open_run
from skyfleet.checkpoints.bucket import read_record
from skyfleet.errors import SkyfleetError
from skyfleet.storage.objects import join, list_objects, stat_object, write_object
from skyfleet.storage.transfer import Check, upload_file
from skyfleet.storage.upload_queue import UploadQueue
from skyfleet.trainer.bucket_layout import REPORT, list_records
from skyfleet.trajectories.skyrl_dump import RESULTS

logger = logging.getLogger(__name__)

_SMALL_BYTES = 8 * 1024 * 1024


class TrajectoryUploads:
    def __init__(
        self,
        bucket: str,
        run_name: str,
        *,
        run_folder: Path,
        exports: Path,
        guard: Check = lambda: None,
    ) -> None:
        self._bucket, self._run_name = bucket, run_name
        self._folder, self._exports = run_folder, exports
        self.queue = UploadQueue("the episodes of", guard=guard)
        self._sent: dict[Path, tuple[int, int]] = {}

    def start(self) -> None:
        """Copy what an earlier process has left: files whose size in the bucket differs."""
        files = [*self._list_files("*"), *self._list_dumps("*")]
        if files:
            self.queue.put("earlier steps", partial(self._upload_missing, files))

    def publish(self, step: int) -> None:
        """Copy the files of a finished step; none of them is written again, except the records."""
        files = [*self._list_files(f"{step:06d}"), *self._list_dumps(str(step))]
        self.queue.put(f"step {step}", partial(self._upload, files))

    def publish_records(self) -> None:
        """Copy what was written after the last step: results.md and the report."""
        self.queue.put("the records", self._upload_records)

    def _list_files(self, step: str) -> list[Path]:
        folder = self._folder / "trajectories"
        patterns = (f"train/step_{step}.*", f"eval/*/step_{step}.*")
        episodes = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
        # A reader that finds an index expects its file.
        episodes.sort(key=lambda path: not path.name.endswith(".gz"))
        return [*episodes, *(self._folder / name for name in list_records(self._folder))]

    def _list_dumps(self, step: str) -> list[Path]:
        dumps = sorted(self._exports.glob(f"dumped_evals/global_step_{step}_evals/**/*.jsonl"))
        dumps.sort(key=lambda path: path.name == RESULTS)
        training = self._exports.glob(f"dumped_training_trajectories/global_step_{step}.jsonl")
        return [*(path for path in dumps if path.name[0] != "."), *sorted(training)]

    def _find_address(self, path: Path) -> str:
        if path.is_relative_to(self._exports / "dumped_evals"):
            folder, *names = path.relative_to(self._exports / "dumped_evals").parts
            place = ["evals", self._run_name, folder.removesuffix("_evals"), *names]
        elif path.is_relative_to(self._exports / "dumped_training_trajectories"):
            place = ["training", self._run_name, path.name]
        elif path == self._folder / REPORT:
            place = ["evals", self._run_name, path.name]
        else:
            place = ["runs", self._run_name, *path.relative_to(self._folder).parts]
        return join(self._bucket, *place)

    def _upload_missing(self, files: Iterable[Path], check: Check) -> None:
        present: dict[str, int] = {}
        for kind in ("runs", "evals", "training"):
            base = join(self._bucket, kind, self._run_name)
            present |= {join(base, info.name): info.size_bytes for info in list_objects(base)}
        missing = [
            path
            for path in files
            if path.is_file() and present.get(self._find_address(path)) != path.stat().st_size
        ]
        self._upload(missing, check)

    def _upload(self, files: Sequence[Path], check: Check) -> None:
        for path in files:
            check()
            self._upload_file(path, check)

    def _upload_records(self, check: Check) -> None:
        self._upload([self._folder / name for name in list_records(self._folder)], check)
        report = self._folder / REPORT
        if report.is_file() and self._may_replace(report):
            self._upload([report], check)

    def _may_replace(self, report: Path) -> bool:
        """Not by one that lacks episodes, which the machines before this one may have had."""
        address = self._find_address(report)
        try:
            missing = find_missing_episodes(open_run(self._folder))
            if missing is None:
                return True
            stat_object(address)
        except (FileNotFoundError, SkyfleetError):  # trying again cannot help with a damaged record
            return True
        logger.warning("%s stays as it is: %s", address, missing.describe())
        return False

    def _upload_file(self, path: Path, check: Check) -> None:
        if not path.is_file():
            return  # moved away by hand
        stat = path.stat()
        state = (stat.st_size, stat.st_mtime_ns)
        if self._sent.get(path) == state:
            return
        address = self._find_address(path)
        if stat.st_size <= _SMALL_BYTES:
            write_object(address, read_record(path))
        else:
            upload_file(path, address, check=check)
        self._sent[path] = state
