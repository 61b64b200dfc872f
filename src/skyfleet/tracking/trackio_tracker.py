"""TrackioTracker: trackio's local dashboard, or a server or Space as its variables say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyfleet.errors import MissingExtraError
from skyfleet.tracking.outage_guard import OutageGuard


class TrackioTracker:
    """trackio, stored in TRACKIO_DIR; `trackio show` opens its dashboard.

    A resumed run becomes a new run of the same name and group, so no row is there twice.
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
        self._guard = OutageGuard("trackio")
        self._run: Any = trackio.init(
            project=project_name,
            name=run_name,
            group=run_name,
            config={**config, "resumed_at_step": resume_step},
            embed=False,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self._guard:
            self._run.log(dict(metrics), step=step)

    def attach(self, name: str, text: str) -> None:
        with self._guard, TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            self._run.log_artifact(path, name=f"{self._run.name}-{name}", type="run")

    def sync(self) -> None:
        """trackio stores its rows itself."""

    def close(self) -> None:
        with self._guard:
            self._run.finish()
