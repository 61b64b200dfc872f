"""CheckpointUploads: upload checkpoints in the background, and delete local copies that are uploaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from time import monotonic

from skyfleet.checkpoints.bucket import BucketCheckpoints, ChangedFileError
from skyfleet.checkpoints.checkpoint import Checkpoint
from skyfleet.checkpoints.resume import list_complete_checkpoints
from skyfleet.storage.local import discard
from skyfleet.storage.transfer import Check
from skyfleet.storage.upload_queue import UploadQueue, UploadRejectedError

logger = logging.getLogger(__name__)

_FOLLOW_SECONDS = 60.0
_POLL_SECONDS = 0.5


class CheckpointUploads:
    """Uploads the checkpoints of one folder, the newest first.

    `list_records` names the run's records, relative to `run_folder`; they are uploaded with every
    checkpoint, before its manifest. `follows` is another queue: a checkpoint is complete after what
    waits there, so that a machine that is lost later has lost nothing of the steps before. If that
    queue is stuck, the checkpoint goes on after a minute.
    """

    def __init__(
        self,
        bucket: BucketCheckpoints,
        root: Path,
        *,
        run_folder: Path,
        list_records: Callable[[], list[str]],
        follows: UploadQueue | None = None,
        guard: Check = lambda: None,
    ) -> None:
        self.bucket, self.root = bucket, root
        self.queue = UploadQueue("checkpoint", guard=guard)
        self._run_folder, self._list_records = run_folder, list_records
        self._follows = follows
        self._uploaded: set[int] = set()
        self._sent_records: dict[str, tuple[int, int]] = {}

    def start(self) -> None:
        """Upload what an earlier process has left; what is complete in the bucket costs one request."""
        for checkpoint in list_complete_checkpoints(self.root):
            self.submit(checkpoint)

    def submit(self, checkpoint: Checkpoint) -> None:
        self._uploaded.discard(checkpoint.step)
        self.queue.put(checkpoint.step, partial(self._upload, checkpoint), priority=checkpoint.step)

    @property
    def pending_steps(self) -> list[int]:
        return [step for step in self.queue.pending if isinstance(step, int)]

    def remove_uploaded(self, *, protect: Collection[int] = ()) -> None:
        """Delete local copies whose upload is complete, except the newest and those in `protect`.

        Not from the upload's thread: a checkpoint that is being saved sweeps the same folder.
        """
        local = sorted(list_complete_checkpoints(self.root), key=lambda c: c.step)
        kept = {*protect, *self.pending_steps}
        for checkpoint in local[:-1]:
            if checkpoint.step in self._uploaded and checkpoint.step not in kept:
                try:
                    discard(checkpoint.folder)
                except OSError as error:
                    logger.warning("the uploaded %s was not removed: %s", checkpoint.folder, error)

    def _upload(self, checkpoint: Checkpoint, check: Check) -> None:
        try:
            self.bucket.upload(
                checkpoint, before_manifest=partial(self._upload_others, check), check=check
            )
        except ChangedFileError as error:
            raise UploadRejectedError(str(error)) from None
        self._uploaded.add(checkpoint.step)

    def _upload_others(self, check: Check) -> None:
        self._upload_records()
        end = monotonic() + _FOLLOW_SECONDS
        while self._follows and not self._follows.wait(_POLL_SECONDS) and monotonic() < end:
            check()

    def _upload_records(self) -> None:
        """Those that have changed: reports of earlier steps are many and stay as they are."""
        states: dict[str, tuple[int, int]] = {}
        for name in self._list_records():
            stat = (self._run_folder / name).stat()
            states[name] = (stat.st_size, stat.st_mtime_ns)
        changed = [name for name, state in states.items() if self._sent_records.get(name) != state]
        self.bucket.upload_records(self._run_folder, changed)
        self._sent_records = states
