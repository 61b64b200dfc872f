"""SkyPilot: parse a task file, launch it, and list, follow and stop what was launched.

SkyPilot's own parser, optimizer, provisioner and job queue do the work; this module calls its Python
client and turns its errors into sentences. It is imported where it is used, because that takes seconds.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from skyfleet.errors import ConfigError, MissingExtraError, SkyfleetError
from skyfleet.launch.task_file import DRAIN_SECONDS, SCRIPTS
from skyfleet.redaction import remember_secrets

logger = logging.getLogger(__name__)

RETRY_SECONDS = (120, 240, 480)
"""Pauses between attempts to find a machine; in each attempt SkyPilot tries every cloud and region."""
RECONNECT_SECONDS = 10
MAX_MACHINES = 10
"""How often an attached launch replaces a machine that was lost."""


class LaunchError(SkyfleetError, RuntimeError):
    """SkyPilot refused a task or lost a run."""


class JobEnd(Enum):
    """How a followed job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """The machine is gone, and the job had not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRun:
    """A run that SkyPilot knows: a cluster of its own, or a managed job."""

    name: str
    is_managed: bool
    status: str
    where: str
    resources: str
    launched_at: float
    recoveries: int = 0


def import_sky() -> Any:
    try:
        import sky
    except ImportError:
        raise MissingExtraError("skypilot", "launch", constrained=False) from None
    return sky


def parse_task(text: str, secrets: Mapping[str, str] | None = None) -> Any:
    """The `sky.Task` of a task file's text; values of secrets are given to it as secrets.

    Without values, names that a launch needs are left out, so that a file can be checked anywhere.
    """
    sky = import_sky()
    remember_secrets((secrets or {}).values())
    config: dict[str, Any] = yaml.safe_load(text)
    envs: dict[str, str | None] = config["envs"]
    config["envs"] = {
        name: value
        for name, value in envs.items()
        if value is not None and name not in (secrets or {})
    }
    try:
        return sky.Task.from_yaml_config(
            config, secrets_overrides=list(secrets.items()) if secrets else None
        )
    except (ValueError, TypeError) as error:
        raise LaunchError(f"SkyPilot refuses the task: {_one_line(error)}") from None


def launch_task(
    task: Any, name: str, *, spot: bool, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Submit the task as cluster `name`, or with `spot` as a managed job of that name.

    Only a failure to find a machine is retried here: once a job is submitted, it restarts by itself.
    """
    sky = import_sky()
    for pause in (*RETRY_SECONDS, None):
        try:
            if spot:
                sky.stream_and_get(sky.jobs.launch(task, name=name))
            else:
                sky.stream_and_get(sky.launch(task, cluster_name=name))
            return
        except sky.exceptions.ResourcesUnavailableError as error:
            if getattr(error, "no_failover", False) or pause is None:
                raise LaunchError(
                    f"no machine for {name}: {_one_line(error)}; add clouds with --cloud, or use "
                    "other --gpus"
                ) from None
            logger.warning("no machine for %s; trying again in %d s", name, pause)
            _take_down(sky, name, spot=spot)
            sleep(pause)
        except Exception as error:
            _raise_sentence(error)
            raise


def follow_task(name: str, *, spot: bool, sleep: Callable[[float], None] = time.sleep) -> JobEnd:
    """Print the job's log until it ends; a lost connection is taken up again.

    A managed job is never LOST: SkyPilot replaces its machines.
    """
    sky = import_sky()
    while True:
        try:
            if spot:
                code = sky.jobs.tail_logs(name=name, follow=True)
            else:
                code = sky.tail_logs(name, None, follow=True)
        except (sky.exceptions.ClusterNotUpError, sky.exceptions.ClusterDoesNotExist):
            return JobEnd.FAILED if spot else JobEnd.LOST
        except Exception as error:
            if not _is_disconnected(error):
                raise
            logger.warning("SkyPilot's server does not answer: %s; asking again", _one_line(error))
            sleep(RECONNECT_SECONDS)
            continue
        if code != _NOT_FINISHED:
            return _END_BY_CODE.get(int(code or 0), JobEnd.FAILED)
        if not spot and not _is_up(sky, name):
            return JobEnd.LOST
        sleep(RECONNECT_SECONDS)


def _is_disconnected(error: Exception) -> bool:
    """SkyPilot's client uses requests, whose errors are OSErrors, but no ConnectionErrors."""
    names = {
        kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("requests")
    }
    is_own = type(error).__name__ == "ApiServerConnectionError"
    return (
        is_own or "RequestException" in names or isinstance(error, ConnectionError | TimeoutError)
    )


def _is_up(sky: Any, name: str) -> bool:
    """By asking the cloud, not SkyPilot's own records; a machine that nobody can ask about is up."""
    try:
        records = sky.get(sky.status([name], refresh=sky.StatusRefreshMode.FORCE))
    except Exception as error:
        if not _is_disconnected(error):
            raise
        logger.warning("SkyPilot's server does not answer: %s; asking again", _one_line(error))
        return True
    return bool(records) and records[0]["status"].value == "UP"


_NOT_FINISHED = 101
"""The connection ended before the job."""
_END_BY_CODE = {
    0: JobEnd.SUCCEEDED,
    100: JobEnd.FAILED,
    103: JobEnd.CANCELLED,
}
"""By SkyPilot's `JobExitCode`."""


def run_until_ended(
    task: Any, name: str, *, spot: bool, sleep: Callable[[float], None] = time.sleep
) -> JobEnd:
    """Launch, follow, and launch again under the same name if the machine was lost."""
    for _ in range(MAX_MACHINES):
        launch_task(task, name, spot=spot, sleep=sleep)
        end = follow_task(name, spot=spot, sleep=sleep)
        if end is not JobEnd.LOST:
            return end
        logger.warning("the machine of %s is gone; launching %s again to resume it", name, name)
    raise LaunchError(f"{name} lost {MAX_MACHINES} machines; look at skyfleet runs logs {name}")


def list_runs(named: Callable[[str], bool] = lambda _: True) -> list[LaunchedRun]:
    """Clusters and managed jobs with such names, newest first."""
    sky = import_sky()
    found = [
        LaunchedRun(
            name=record["name"],
            is_managed=False,
            status=record["status"].value,
            where="/".join(part for part in (record["cloud"], record["region"]) if part),
            resources=record["resources_str"] or "",
            launched_at=float(record["launched_at"] or 0),
        )
        for record in sky.get(sky.status())
        if named(record["name"])
    ]
    found += [run for run in _list_managed(sky) if named(run.name)]
    return sorted(found, key=lambda run: -run.launched_at)


def _list_managed(sky: Any) -> list[LaunchedRun]:
    try:
        records, *_ = sky.get(sky.jobs.queue_v2(refresh=False))
    except sky.exceptions.ClusterNotUpError:  # nobody has launched a managed job
        return []
    return [
        LaunchedRun(
            name=record["job_name"] or "",
            is_managed=True,
            status=record["status"].value if record["status"] else "",
            where="/".join(part for part in (record["cloud"], record["region"]) if part),
            resources=record["resources"] or "",
            launched_at=float(record["submitted_at"] or 0),
            recoveries=int(record["recovery_count"] or 0),
        )
        for record in records
    ]


def find_run(name: str) -> LaunchedRun:
    """The newest run of that name."""
    runs = list_runs()
    found = next((run for run in runs if run.name == name), None)
    if found is None:
        known = ", ".join(run.name for run in runs[:5]) or "none"
        raise ConfigError(f"SkyPilot knows no run {name!r}; the newest are: {known}")
    return found


def print_logs(run: LaunchedRun, *, follow: bool) -> int:
    """Print the log of the run's newest job; return SkyPilot's exit code of the job."""
    sky = import_sky()
    if run.is_managed:
        return int(sky.jobs.tail_logs(name=run.name, follow=follow) or 0)
    return int(sky.tail_logs(run.name, None, follow=follow) or 0)


def stop_run(
    run: LaunchedRun, *, timeout_seconds: int = DRAIN_SECONDS, force: bool = False
) -> None:
    """End the trainer, wait until its uploads are complete, then give the machine back.

    A trainer that still uploads after `timeout_seconds` keeps its machine, unless `force`: the machine
    goes down by itself once it is idle.
    """
    sky = import_sky()
    if run.is_managed:
        # SkyPilot takes the machine down, and before that runs the drain hook of the task file.
        sky.stream_and_get(sky.jobs.cancel(name=run.name))
        return
    if run.status == "UP" and not _drain(sky, run.name, timeout_seconds) and not force:
        raise LaunchError(
            f"{run.name} still saves or uploads after {timeout_seconds} s, so its machine stays up until "
            f"it is idle; repeat the command, or use --force, which may lose the newest checkpoint"
        )
    _take_down(sky, run.name, spot=False)


def _drain(sky: Any, name: str, timeout_seconds: int) -> bool:
    """Whether the trainer has ended. A job of its own, because a cancelled job is killed after 30 s."""
    drain = sky.Task(
        name="drain",
        run=f"DRAIN_SECONDS={timeout_seconds} bash ~/sky_workdir/{SCRIPTS}/drain.sh",
    )
    try:
        job_id, _ = sky.stream_and_get(sky.exec(drain, cluster_name=name))
        return int(sky.tail_logs(name, job_id, follow=True) or 0) == 0
    except sky.exceptions.ClusterNotUpError:
        logger.warning("%s is not up; its newest complete checkpoint is in the bucket", name)
        return True


def _take_down(sky: Any, name: str, *, spot: bool) -> None:
    if spot:  # the job's controller takes its machines down
        return
    try:
        sky.stream_and_get(sky.down(name))
    except (sky.exceptions.ClusterDoesNotExist, ValueError):
        logger.info("%s has no machine", name)


def _raise_sentence(error: Exception) -> None:
    """LaunchError in place of SkyPilot's own exceptions; others are bugs, and are not touched."""
    kind = type(error)
    if kind.__name__ == "NoCloudAccessError":
        raise LaunchError(
            f"SkyPilot has access to no cloud: {_one_line(error)}; export a key such as "
            "LAMBDA_API_KEY, or run sky check"
        ) from None
    if kind.__module__.startswith("sky."):
        raise LaunchError(f"SkyPilot: {kind.__name__}: {_one_line(error)}") from None


def write_task(text: str, folder: Path, name: str) -> Path:
    """Keep the file that was launched, for `sky launch` and for the record."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _one_line(error: BaseException) -> str:
    """The message on one line, without the colours of a terminal."""
    words = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split()
    return " ".join(words)[:400] or type(error).__name__
