"""MlflowTracker: an MLflow server, or a database in the run folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.tracking.background import BackgroundQueue, Pause

GROUP_TAG = "skyfleet.group"
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_CHARACTERS = 1000, 100, 6000
"""MLflow's limits of one call."""
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")


class MlflowTracker:
    """MLflow at MLFLOW_TRACKING_URI, or without it in `mlflow.db` of the run folder.

    A resumed run becomes a new MLflow run below the first one of its name. Rows are sent in the
    background, so an outage of the server never stops or delays the run.
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
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if uri else (folder / "mlflow").resolve().as_uri()
        if not uri:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            self._client: Any = MlflowClient(uri or f"sqlite:///{folder.resolve()}/mlflow.db")
            experiment = _open_experiment(self._client, project_name, artifacts)
            tags = {GROUP_TAG: run_name}
            if resume_step is not None:
                tags["skyfleet.resumed_at_step"] = str(resume_step)
                if parent := _find_first(self._client, experiment, run_name):
                    tags["mlflow.parentRunId"] = parent
            created = self._client.create_run(experiment, tags=tags, run_name=run_name)
        except MlflowException as error:
            raise ConfigError(
                f"trainer.logger='mlflow': {error}; check MLFLOW_TRACKING_URI, or choose 'jsonl'"
            ) from error
        self._run_id: str = created.info.run_id
        self._calls = BackgroundQueue[Callable[[], None]]("mlflow", _call)
        params = [
            Param(_NOT_IN_NAMES.sub("_", key), str(value)[:_MAX_PARAM_CHARACTERS])
            for key, value in config.items()
        ]
        for start in range(0, len(params), _MAX_PARAMS):
            self._log_batch(params=params[start : start + _MAX_PARAMS])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        row = [
            self._metric(_NOT_IN_NAMES.sub("_", key), float(value), now, step)
            for key, value in metrics.items()
        ]
        for start in range(0, len(row), _MAX_METRICS):
            self._log_batch(metrics=row[start : start + _MAX_METRICS])

    def attach(self, name: str, text: str) -> None:
        self._calls.put(lambda: self._client.log_text(self._run_id, text, name))

    def sync(self) -> None:
        """MLflow stores its rows itself."""

    def close(self) -> None:
        self._calls.put(lambda: self._client.set_terminated(self._run_id))
        self._calls.close()

    def _log_batch(self, **values: list[Any]) -> None:
        self._calls.put(lambda: self._client.log_batch(self._run_id, **values))


def _call(function: Callable[[], None], pause: Pause) -> None:
    function()


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
