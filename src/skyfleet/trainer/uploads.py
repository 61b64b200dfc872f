"""RunUploads: what a run copies to its buckets, and the wait for it at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

from skyfleet.checkpoints.checkpoint import Checkpoint
from skyfleet.checkpoints.uploads import CheckpointUploads
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError
from skyfleet.storage.bucket_lock import BucketLock
from skyfleet.storage.store import read_bucket
from skyfleet.storage.upload_queue import UploadQueue, UploadRejectedError
from skyfleet.trainer.bucket_layout import list_records, locate_checkpoints
from skyfleet.trainer.trajectory_uploads import TrajectoryUploads

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_QUIET_SECONDS = 2.0
"""A wait this long is not mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUploads:
    """Without buckets it does nothing."""

    checkpoints: CheckpointUploads | None = None
    trajectories: TrajectoryUploads | None = None
    timeout_seconds: float = 0.0

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        locks: Sequence[BucketLock] = (),
        *,
        on_failing: Callable[[str, str], object] = lambda name, reason: None,
    ) -> RunUploads:
        """`locks` stop the uploads of a process whose bucket was taken over by another.

        `on_failing` is called once per outage in the thread that uploads, with a name and the reason.
        """
        trainer, folder = config.trainer, Path(config.trainer.run_path)
        guard = partial(_check_locks, locks)
        bucket, trajectories = locate_checkpoints(config), None
        if trainer.trajectory_bucket is not None:
            trajectories = TrajectoryUploads(
                read_bucket(trainer.trajectory_bucket),
                trainer.run_name,
                run_folder=folder,
                exports=Path(trainer.export_path),
                guard=guard,
            )
        checkpoints = None
        if bucket is not None:
            checkpoints = CheckpointUploads(
                bucket,
                Path(trainer.ckpt_path),
                run_folder=folder,
                list_records=partial(list_records, folder),
                follows=None if trajectories is None else trajectories.queue,
                guard=guard,
            )
        for owner in (checkpoints, trajectories):
            if owner is not None:
                owner.queue.on_failing = on_failing
        return cls(
            checkpoints=checkpoints,
            trajectories=trajectories,
            timeout_seconds=trainer.upload_timeout_seconds,
        )

    def start(self) -> None:
        """Upload what an earlier process has left."""
        if self.checkpoints:
            self.checkpoints.start()
        if self.trajectories:
            self.trajectories.start()

    @property
    def pending_steps(self) -> list[int]:
        """Checkpoints that are not in the bucket yet, and must stay on the disk."""
        return self.checkpoints.pending_steps if self.checkpoints else []

    @property
    def metrics(self) -> dict[str, float]:
        """How many checkpoints wait for their upload; empty without a bucket."""
        if self.checkpoints is None:
            return {}
        return {"checkpoint/not_uploaded": float(len(self.pending_steps))}

    def submit(self, checkpoint: Checkpoint) -> None:
        if self.checkpoints:
            self.checkpoints.submit(checkpoint)

    def remove_uploaded(self, protect: Collection[int]) -> None:
        if self.checkpoints:
            self.checkpoints.remove_uploaded(protect=protect)

    def publish(self, step: int) -> None:
        """Copy the dumps and episodes of a finished step."""
        if self.trajectories:
            self.trajectories.publish(step)

    async def close(self) -> None:
        """Wait for all uploads, `trainer.upload_timeout_seconds` at most; what is left is named."""
        if self.trajectories:
            self.trajectories.publish_records()
        queues = [owner.queue for owner in (self.checkpoints, self.trajectories) if owner]
        began = monotonic()
        try:
            if not await _wait(queues, began + min(_QUIET_SECONDS, self.timeout_seconds)):
                logger.warning(
                    "uploading %s, for %g s at most", _describe_left(queues), self.timeout_seconds
                )
                await _wait(queues, began + self.timeout_seconds)
        finally:
            left = _describe_left(queues)
            for queue in queues:
                queue.stop()
            if left:
                logger.warning(
                    "not uploaded: %s; it stays on this machine, and the same command uploads it",
                    left,
                )


def _check_locks(locks: Sequence[BucketLock]) -> None:
    try:
        for lock in locks:
            lock.check()
    except CheckpointError as error:
        raise UploadRejectedError(str(error)) from None


async def _wait(queues: Collection[UploadQueue], end: float) -> bool:
    """Whether everything was uploaded before `end`, on the monotonic clock."""
    # The queues work in threads, and a second Ctrl-C must end the wait.
    while (left := _describe_left(queues)) and monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)
    return not left


def _describe_left(queues: Collection[UploadQueue]) -> str:
    return ", ".join(f"{queue.title} {name}" for queue in queues for name in queue.pending)
