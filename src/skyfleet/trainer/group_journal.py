"""GroupJournal: the journal of an asynchronous run.

A segment holds the finished episodes of one draw of the sampler, whichever step trains on them, and
`batches.jsonl` which groups each step trained on. A killed run repeats those steps on the same
episodes, which gives the same weights, and so every episode that later weights sampled stays usable.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from skyfleet.storage.disk_full import explain_disk_full
from skyfleet.storage.local import make_folder, sync_folder, write_atomically
from skyfleet.trainer.journal import Journal
from skyfleet.trainer.open_groups import OpenGroup, OpenGroups
from skyfleet.trajectories.journal_segment import (
    JournalRecord,
    Place,
    SegmentWriter,
    encode_record,
    read_segment,
)
from skyfleet.trajectories.trajectory import Trajectory

logger = logging.getLogger(__name__)

BATCHES = "batches.jsonl"


class RecordedBatch(NamedTuple):
    """The groups that a step was trained on."""

    policy_version: int
    """The learner's before the step."""
    numbers: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class GroupJournal(Journal):
    groups: OpenGroups
    first_needed_draw: int = 1
    """The first draw of which the newest checkpoint has an open group."""
    seconds: float = 0.0
    """Spent on writing and syncing since it was last read."""
    _writers: dict[int, SegmentWriter] = field(default_factory=dict)
    """By draw."""

    @classmethod
    def extend_journal(cls, journal: Journal, groups: OpenGroups) -> GroupJournal:
        """The journal of the same run, for groups that its checkpoint left open."""
        draws = [groups.draw_of(group) for group in groups]
        return cls(
            folder=journal.folder,
            run_id=journal.run_id,
            is_on=journal.is_on,
            is_strict=journal.is_strict,
            checkpoint_step=journal.checkpoint_step,
            groups=groups,
            first_needed_draw=min(draws, default=journal.checkpoint_step + 1),
        )

    def add(self, group: OpenGroup, policy_version: int, episode: Trajectory, line: bytes) -> None:
        """Record a finished episode of a group that `policy_version` began."""
        if not self.is_on:
            return
        start, draw = perf_counter(), self.groups.draw_of(group)
        if draw not in self._writers:
            self._writers[draw] = SegmentWriter(self._path(draw))
        self._writers[draw].write(
            JournalRecord(
                run_id=self.run_id,
                step=draw,
                policy_version=policy_version,
                place=Place(0, group.number % self.groups.batch_size, episode.sample),
                episode=episode,
                line=line,
            )
        )
        self.seconds += perf_counter() - start

    async def add_batch(self, step: int, batch: RecordedBatch) -> None:
        """Everything recorded is durable, and so is what `step` is about to be trained on."""
        if not self.is_on:
            return
        start = perf_counter()
        await asyncio.to_thread(self._sync_segments)
        path = self.folder / BATCHES
        with explain_disk_full(path):
            make_folder(self.folder)
            is_new = not path.exists()
            with path.open("ab") as file:
                file.write(_encode_batch(self.run_id, step, batch))
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync_folder(self.folder)
        self.seconds += perf_counter() - start

    def _sync_segments(self) -> None:
        for writer in list(self._writers.values()):
            writer.sync()

    def read_draw(self, groups: Iterable[OpenGroup]) -> dict[int, list[JournalRecord]]:
        """The recorded episodes of these groups, by the number of the group."""
        found: dict[int, dict[int, JournalRecord]] = {}
        by_draw: dict[int, list[OpenGroup]] = {}
        for group in groups:
            by_draw.setdefault(self.groups.draw_of(group), []).append(group)
        for draw, own in by_draw.items():
            if not self.is_on or not (path := self._path(draw)).exists():
                continue
            keys = {group.number % self.groups.batch_size: group for group in own}
            for record in read_segment(path, self._report_damage):
                known = keys.get(record.place.group)
                is_own = (record.run_id, record.step) == (self.run_id, draw)
                if known and is_own and known.task.key == record.episode.task_key:
                    found.setdefault(known.number, {})[record.place.sample] = record
        return {number: list(records.values()) for number, records in found.items()}

    def read_batches(self, after: int) -> dict[int, RecordedBatch]:
        """What the steps right after step `after` were trained on."""
        path, batches = self.folder / BATCHES, dict[int, RecordedBatch]()
        if not self.is_on or not path.exists():
            return {}
        content = path.read_bytes()
        if not content.endswith(b"\n"):  # a killed process was writing: the next line begins anew
            write_atomically(path, content[: content.rfind(b"\n") + 1])
        for line in content.split(b"\n")[:-1]:
            if (decoded := _decode_batch(line, self.run_id)) is not None:
                step, batch = decoded
                batches[step] = batch
        recorded: dict[int, RecordedBatch] = {}
        while (batch_or_none := batches.get(after + 1 + len(recorded))) is not None:
            recorded[after + 1 + len(recorded)] = batch_or_none
        return recorded

    def discard(self, unusable: Sequence[JournalRecord], *, after: int) -> None:
        """Remove episodes that this run's weights cannot have sampled, and the batches after a step.

        Later weights may get the same version, and would pass for those that sampled them.
        """
        lost = {record.line for record in unusable}
        for draw in sorted({record.step for record in unusable}):
            if writer := self._writers.pop(draw, None):
                writer.close()
            kept = [r for r in read_segment(self._path(draw), logger.warning) if r.line not in lost]
            write_atomically(self._path(draw), b"".join(map(encode_record, kept)))
        self._keep_batches(range(after + 1))

    def _keep_batches(self, steps: range) -> None:
        path = self.folder / BATCHES
        if not path.exists():
            return
        lines = path.read_bytes().split(b"\n")[:-1]
        decoded = [(line, _decode_batch(line, self.run_id)) for line in lines]
        kept = [line for line, batch in decoded if batch is not None and batch[0] in steps]
        write_atomically(path, b"".join(line + b"\n" for line in kept))

    def follow_checkpoint(self, step: int) -> None:
        """Remove what no resume needs, now that the checkpoint of `step` is complete.

        What the checkpoint before it needs stays, because the new one may be damaged.
        """
        if step <= self.checkpoint_step:
            return
        previous, self.checkpoint_step = self.checkpoint_step, step
        open_draws = [
            1 + number // self.groups.batch_size
            for number, _ in self.groups.state_dict(step)["groups"]
        ]
        needed, self.first_needed_draw = self.first_needed_draw, min(open_draws, default=step + 1)
        try:
            for draw in [draw for draw in self._writers if draw < needed]:
                self._writers.pop(draw).close()
            self._remove(path for draw, path in self._list_segments() if draw < needed)
            self._keep_batches(range(previous + 1, step + 1))
        except OSError as error:
            logger.warning("old parts of the journal could not be removed: %s", error)

    def remove_after(self, step: int) -> None:
        """Forget every episode: open groups, also those of earlier draws, are played again."""
        self.close()
        batches = self.folder / BATCHES
        self._remove(path for _, path in self._list_segments())
        self._remove([batches] if batches.exists() else [])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _path(self, draw: int) -> Path:
        return self.folder / f"step_{draw:06d}.jsonl"


def _encode_batch(run_id: str, step: int, batch: RecordedBatch) -> bytes:
    record = json.dumps(
        {
            "run_id": run_id,
            "step": step,
            "policy_version": batch.policy_version,
            "groups": batch.numbers,
        },
        separators=(",", ":"),
    )
    digest = hashlib.sha256(record.encode("ascii")).hexdigest()
    return f'{{"sha256":"{digest}","record":{record}}}\n'.encode("ascii")


def _decode_batch(line: bytes, run_id: str) -> tuple[int, RecordedBatch] | None:
    """The step and its groups; None if the line is damaged, or of another run."""
    try:
        values = json.loads(line)["record"]
        step = int(values["step"])
        batch = RecordedBatch(values["policy_version"], tuple(values["groups"]))
    except (ValueError, KeyError, TypeError):
        return None
    return (step, batch) if _encode_batch(run_id, step, batch) == line + b"\n" else None
