"""TensorboardTracker: event files for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyfleet.errors import MissingExtraError


class TensorboardTracker:
    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard") from None
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        if resume_step is not None:
            # TensorBoard hides what earlier files say of this step and later ones.
            self._add(Event(session_log=SessionLog(status=SessionLog.START)), resume_step + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [
            self._summary.Value(tag=key, simple_value=value)
            for key, value in sorted(metrics.items())
        ]
        self._add(self._event(summary=self._summary(value=values)), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Any, step: int) -> None:
        event.step, event.wall_time = step, time.time()
        self._writer.add_event(event)
