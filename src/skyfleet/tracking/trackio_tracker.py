"""TrackioTracker: trackio's local dashboard, or a server or Space as its variables say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.redaction import redact
from skyfleet.tracking.background import BackgroundTracker


class TrackioTracker(BackgroundTracker):
    """trackio, stored in TRACKIO_DIR; `trackio show` opens its dashboard.

    A resumed run becomes a new run of the same name and group, so no row is there twice. Its calls
    run in the background: it waits a minute for a server that does not answer.
    """

    def __init__(
        self,
        *,
        project_name: str,
        run_name: str,
        config: Mapping[str, object],
        resume_step: int | None = None,
    ) -> None:
        try:
            import trackio
        except ImportError:
            raise MissingExtraError("trackio", "trackio", constrained=False) from None
        try:
            self._run: Any = trackio.init(
                project=project_name,
                name=run_name,
                group=run_name,
                config={**config, "resumed_at_step": resume_step},
                embed=False,
            )
        except Exception as error:
            raise ConfigError(
                f"trainer.logger='trackio': {redact(str(error))}; check TRACKIO_DIR and "
                "TRACKIO_SERVER_URL, or choose 'jsonl'"
            ) from error
        super().__init__("trackio", end_run=lambda _: self._run.finish())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        row = dict(metrics)
        self.call(lambda: self._run.log(row, step=step))

    def attach(self, name: str, text: str) -> None:
        self.call(lambda: self._store(name, text))

    def _store(self, name: str, text: str) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            self._run.log_artifact(path, name=f"{self._run.name}-{name}", type="run")
