"""TensorboardTracker: TensorBoard event files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from skyfleet.errors import MissingExtraError
from skyfleet.storage.local import sync_file


class TensorboardTracker:
    """TensorBoard event files."""

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int | None,
        rows_before: Callable[[], Iterable[tuple[int, Mapping[str, float]]]] = tuple,
    ) -> None:
        """`rows_before` are written first if a resumed run has none in this folder."""
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard") from None
        self._event, self._summary = Event, Summary
        is_new = resume_step is not None and not any(folder.glob("events.*"))
        self._folder, self._writer = folder, EventFileWriter(str(folder))
        if is_new:
            for step, row in rows_before():
                self.log(row, step)
        if resume_step is not None:
            # After this event TensorBoard ignores what earlier files hold from this step on.
            self._add(Event(session_log=SessionLog(status=SessionLog.START)), resume_step + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [
            self._summary.Value(tag=key, simple_value=value)
            for key, value in sorted(metrics.items())
        ]
        self._add(self._event(summary=self._summary(value=values)), step)
        self._writer.flush()

    def attach(self, name: str, text: str) -> None:
        """Shown as text; TensorBoard shows no HTML, which stays in the run folder."""
        if not name.endswith(".html"):
            value = self._text(name, f"```\n{text}\n```")
            self._add(self._event(summary=self._summary(value=[value])), 0)

    def sync(self) -> None:
        self._writer.flush()
        for path in self._folder.iterdir():
            sync_file(path)

    def close(self) -> None:
        self._writer.close()

    def _text(self, tag: str, text: str) -> Any:
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = create_summary_metadata(display_name=tag, description="")
        return self._summary.Value(tag=tag, metadata=metadata, tensor=tensor)

    def _add(self, event: Any, step: int) -> None:
        event.step, event.wall_time = step, time.time()
        self._writer.add_event(event)
