"""MlflowTracker: an MLflow server, or a database in the run folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.redaction import redact
from skyfleet.tracking.background import BackgroundTracker, RunState

GROUP_TAG = "skyfleet.group"
START_SECONDS = 20.0
"""How long the start of a run waits for the server, to report a refusal before anything is trained."""
_MAX_ENTRIES = {"metrics": 1000, "params": 100}
_MAX_PARAM_CHARACTERS = 6000
"""MLflow's limits of one call."""
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")


class MlflowTracker(BackgroundTracker):
    """MLflow at MLFLOW_TRACKING_URI, or without it in `mlflow.db` of the run folder.

    A resumed run becomes a new MLflow run below the first one of its name. Everything is sent in the
    background, so an outage of the server never stops or delays the run, also when it starts.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project_name: str,
        run_name: str,
        config: Mapping[str, object],
        resume_step: int | None = None,
    ) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise MissingExtraError("mlflow", "mlflow", constrained=False) from None
        self._metric: Any = Metric
        self._project_name, self._run_name, self._resume_step = project_name, run_name, resume_step
        self._params = [
            Param(_NOT_IN_NAMES.sub("_", key), str(value)[:_MAX_PARAM_CHARACTERS])
            for key, value in config.items()
        ]
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._artifacts = None if uri else (folder / "mlflow").resolve().as_uri()
        if not uri:
            folder.mkdir(parents=True, exist_ok=True)
        self._run_id: str | None = None
        self._refusal: Exception | None = None
        self._was_started = Event()
        try:
            self._client: Any = MlflowClient(uri or f"sqlite:///{folder.resolve()}/mlflow.db")
        except MlflowException as error:
            raise _explain(error) from error
        super().__init__("mlflow", end_run=self._terminate)
        self.call(self._start)
        self._was_started.wait(START_SECONDS)
        if self._refusal is not None:
            self.close()
            raise _explain(self._refusal) from self._refusal

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        row = [
            self._metric(_NOT_IN_NAMES.sub("_", key), float(value), now, step)
            for key, value in metrics.items()
        ]
        self.call(lambda: self._send(metrics=row))

    def attach(self, name: str, text: str) -> None:
        self.call(lambda: self._client.log_text(self._open(), text, name))

    # All below runs in the background.

    def _start(self) -> None:
        try:
            self._open()
        except Exception as error:
            if self._artifacts is None and _is_outage(error):
                raise  # a server; it is tried again with the first row
            self._refusal = error
        finally:
            self._was_started.set()

    def _open(self) -> str:
        """The run's id; a run that could not be created is tried again with the next row."""
        if self._run_id is None:
            experiment = _open_experiment(self._client, self._project_name, self._artifacts)
            tags = {GROUP_TAG: self._run_name}
            if self._resume_step is not None:
                tags["skyfleet.resumed_at_step"] = str(self._resume_step)
                if parent := _find_first(self._client, experiment, self._run_name):
                    tags["mlflow.parentRunId"] = parent
            created = self._client.create_run(experiment, tags=tags, run_name=self._run_name)
            self._run_id = str(created.info.run_id)
            self._send(params=self._params)
        return self._run_id

    def _send(self, **values: list[Any]) -> None:
        run_id = self._open()
        for name, entries in values.items():
            for start in range(0, len(entries), _MAX_ENTRIES[name]):
                part = entries[start : start + _MAX_ENTRIES[name]]
                self._client.log_batch(run_id, **{name: part})

    def _terminate(self, state: RunState) -> None:
        if self._run_id is not None:
            self._client.set_terminated(self._run_id, status=state.upper())


def _is_outage(error: Exception) -> bool:
    """Whether a later request may succeed, unlike one that the server has refused."""
    status = getattr(error, "get_http_status_code", lambda: 500)()
    return not 400 <= status < 500 or status in (408, 425, 429)


def _explain(error: Exception) -> ConfigError:
    return ConfigError(
        f"trainer.logger='mlflow': {redact(str(error))}; check MLFLOW_TRACKING_URI, or choose 'jsonl'"
    )


def _open_experiment(client: Any, name: str, artifacts: str | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(name, artifact_location=artifacts))


def _find_first(client: Any, experiment: str, run_name: str) -> str | None:
    """The id of the first run of this name, under which resumed ones are shown."""
    quote = '"' if "'" in run_name else "'"
    if quote in run_name:  # MLflow's filters have no way to escape it
        return None
    found = client.search_runs(
        [experiment],
        filter_string=f"tags.`{GROUP_TAG}` = {quote}{run_name}{quote}",
        order_by=["attributes.start_time ASC"],
        max_results=1,
    )
    return found[0].info.run_id if found else None
