"""The journal of a run: finished training episodes are durable before they are trained on.

A killed run takes the episodes of the steps after its checkpoint from `journal/step_N.jsonl`
instead of playing them again. A step that plays any of its episodes again may end with other
weights, so what was recorded for later steps is removed before the first new episode is recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import TracebackType
from uuid import uuid4

from skyfleet.checkpoints.checkpoint import Checkpoint
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError
from skyfleet.storage.local import discard, sync_folder
from skyfleet.tasks.task import Task
from skyfleet.trainer.run_identity import is_own_checkpoint
from skyfleet.trajectories.journal_segment import (
    JournalRecord,
    Place,
    SegmentWriter,
    read_segment,
)
from skyfleet.trajectories.trajectory import Group, Trajectory

logger = logging.getLogger(__name__)

FOLDER = "journal"


@dataclass(slots=True, kw_only=True)
class Journal:
    """The segments of a run, one per step."""

    folder: Path
    run_id: str
    is_on: bool = True
    """`trainer.journal`."""
    is_strict: bool = False
    """`trainer.resume_strict`: a damaged record is an error."""
    checkpoint_step: int = -1
    """Of the newest checkpoint; -1 before the first."""

    @classmethod
    def from_config(cls, config: RunConfig, run_id: str, checkpoint: Checkpoint | None) -> Journal:
        return cls(
            folder=Path(config.trainer.run_path) / FOLDER,
            run_id=run_id,
            is_on=config.trainer.journal,
            is_strict=config.trainer.resume_strict,
            checkpoint_step=checkpoint.step if checkpoint else -1,
        )

    def open_step(self, step: int, *, policy_version: int) -> StepJournal:
        """The journal of a step that begins, with what a killed process recorded for it."""
        if not self.is_on:
            self.remove_after(step - 1)  # else a later start would take them for its own
        path = self.folder / f"step_{step:06d}.jsonl"
        return StepJournal(
            journal=self,
            step=step,
            policy_version=policy_version,
            records=self._read(path, step, policy_version) if path.exists() else {},
            writer=SegmentWriter(path),
        )

    def follow_checkpoint(self, step: int) -> None:
        """Remove the steps that no resume needs, now that the checkpoint of `step` is complete.

        Those since the checkpoint before it stay: a run whose newest checkpoint is damaged resumes
        from that one.
        """
        if step <= self.checkpoint_step:
            return
        previous, self.checkpoint_step = self.checkpoint_step, step
        try:
            self._remove(path for number, path in self._list_segments() if number <= previous)
        except OSError as error:
            logger.warning("old steps of the journal could not be removed: %s", error)

    def remove_after(self, step: int) -> None:
        """Forget the episodes of later steps: they are played again."""
        self._remove(path for number, path in self._list_segments() if number > step)

    def _read(self, path: Path, step: int, policy_version: int) -> dict[Place, JournalRecord]:
        expected = (self.run_id, step, policy_version)
        records: dict[Place, JournalRecord] = {}
        n_others = 0
        for record in read_segment(path, self._report_damage):
            if (record.run_id, record.step, record.policy_version) == expected:
                records[record.place] = record
            else:
                n_others += 1
        if n_others:
            logger.warning(
                "%s: %d episodes are of another run or were sampled by other weights than version "
                "%d; they are played again",
                path,
                n_others,
                policy_version,
            )
        return records

    def _report_damage(self, damage: str) -> None:
        if self.is_strict:
            raise CheckpointError(
                f"trainer.resume_strict=true and the journal is damaged: {damage}; restore the file, "
                "or set trainer.resume_strict=false to play the episode again"
            )
        logger.warning("the episode is played again: %s", damage)

    def _list_segments(self) -> list[tuple[int, Path]]:
        paths = (
            (path.stem.removeprefix("step_"), path) for path in self.folder.glob("step_*.jsonl")
        )
        return sorted((int(number), path) for number, path in paths if number.isdecimal())

    def _remove(self, paths: Iterable[Path]) -> None:
        removed = False
        for path in paths:
            path.unlink(missing_ok=True)
            removed = True
        if removed:
            sync_folder(self.folder)


@dataclass(slots=True, kw_only=True)
class StepJournal:
    """What is recorded of one step: episodes of a killed process, then new ones."""

    journal: Journal
    step: int
    policy_version: int
    records: Mapping[Place, JournalRecord]
    writer: SegmentWriter
    restored: list[Trajectory] = field(default_factory=list)
    """Episodes that were not played again."""
    seconds: float = 0.0
    """Spent on writing and syncing."""

    def restore(
        self, batch: int, tasks: Sequence[Task], n_samples: int
    ) -> dict[tuple[str, int], JournalRecord]:
        """The recorded episodes of a batch, by task key and sample."""
        found: dict[tuple[str, int], JournalRecord] = {}
        for group, task in enumerate(tasks):
            for sample in range(n_samples):
                record = self.records.get(Place(batch, group, sample))
                if record is not None and record.episode.task_key == task.key:
                    found[task.key, sample] = record
        self.restored += (record.episode for record in found.values())
        return found

    def add(self, batch: int, group: int, episode: Trajectory, line: bytes) -> None:
        """Record a finished episode; `line` is its line in the trajectory archive."""
        if not self.journal.is_on:
            return
        with self._timed():
            if not self.writer.is_open:
                self.journal.remove_after(self.step)
            self.writer.write(
                JournalRecord(
                    run_id=self.journal.run_id,
                    step=self.step,
                    policy_version=self.policy_version,
                    place=Place(batch, group, episode.sample),
                    episode=episode,
                    line=line,
                )
            )

    def describe(self, groups: Sequence[Group]) -> str | None:
        """A sentence if episodes were restored."""
        if not self.restored:
            return None
        n_played = sum(len(group.trajectories) for group in groups) - len(self.restored)
        return (
            f"step {self.step}: {len(self.restored)} rollouts from the journal, {n_played} played"
        )

    async def sync(self) -> None:
        """Make every episode durable: called before the step is trained on."""
        with self._timed():
            await asyncio.to_thread(self.writer.sync)

    def __enter__(self) -> StepJournal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.writer.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - start


def clear_journal(run: Path) -> None:
    """Forget every episode of the run in this folder, which goes on from another machine's weights."""
    if (run / FOLDER).exists():
        discard(run / FOLDER)


def choose_run_id(saved: str, checkpoint: Checkpoint | None, checkpoints: Path) -> str:
    """The run's identity, which its checkpoints hold: `saved` if it is its own checkpoint.

    A run that begins from a checkpoint of another run, or of an earlier version, has the same
    identity whenever it begins from there.
    """
    if checkpoint is None:
        return uuid4().hex
    if saved and is_own_checkpoint(checkpoint, checkpoints):
        return saved
    origin = f"{checkpoints.resolve()} {checkpoint.manifest.model_dump_json()}"
    return hashlib.sha256(origin.encode()).hexdigest()[:32]
