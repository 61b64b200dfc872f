"""Trackers: write one row of metrics per step to files, TensorBoard, W&B or the console."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TextIO

from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.redaction import redact, redact_value
from skyfleet.storage.disk_full import explain_disk_full
from skyfleet.storage.local import make_folder, sync_file, write_atomically
from skyfleet.storage.step_rows import find_missing, read_step, truncate_rows
from skyfleet.tracking.console import ConsoleTracker

logger = logging.getLogger(__name__)

PACKAGES = {"console": None, "jsonl": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""The package that each tracker needs; its extra has the same name."""


class Tracker(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Called once per step; `step` only increases."""
        ...

    def sync(self) -> None:
        """Make the rows durable: called before a checkpoint that follows them is saved."""
        ...

    def close(self) -> None: ...


def make_trackers(
    names: Sequence[str],
    *,
    run_folder: Path,
    run_name: str,
    project_name: str,
    config: Mapping[str, object],
    resume_step: int | None,
    has_rows: bool = False,
    total_steps: int | None = None,
) -> list[Tracker]:
    """Build one tracker per name, in that order; rows after `resume_step` are discarded.

    `has_rows`: the rows before it are in this folder, and a warning reports those that are not.
    """
    check_trackers(names)
    # wandb first: it raises without a login, and then no other tracker has written a file yet.
    factories: dict[str, Callable[[], Tracker]] = {
        "wandb": lambda: WandbTracker(
            run_folder, project_name=project_name, run_name=run_name, config=config
        ),
        "tensorboard": lambda: TensorboardTracker(
            run_folder / "tensorboard", resume_step=resume_step
        ),
        "jsonl": lambda: JsonlTracker(run_folder, resume_step=resume_step, has_rows=has_rows),
        "console": lambda: ConsoleTracker(
            total_steps=total_steps, done_steps=max(resume_step or 0, 0)
        ),
    }
    trackers: dict[str, Tracker] = {}
    with ExitStack() as opened:
        for name in filter(names.__contains__, factories):
            trackers[name] = factories[name]()
            opened.callback(trackers[name].close)
        opened.pop_all()
    return [trackers[name] for name in dict.fromkeys(names)]


def check_trackers(names: Sequence[str]) -> None:
    """Raise if a name is unknown or its package is not installed."""
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(f"trainer.logger={name!r}; choose from {sorted(PACKAGES)}")
        if (package := PACKAGES[name]) and find_spec(package) is None:
            raise MissingExtraError(package, package)


class JsonlTracker:
    """`metrics.jsonl` and `timing.jsonl`, one JSON object per step.

    `metrics.jsonl` is byte-identical for two runs with the same seed; values that depend on the
    machine (`timing/*`) go to `timing.jsonl`.
    """

    def __init__(self, folder: Path, *, resume_step: int | None, has_rows: bool = False) -> None:
        """Rows after `resume_step` are removed; None starts both files empty.

        `has_rows`: a file without any row has lost them.
        """
        make_folder(folder)
        self._metrics = _reopen(folder / "metrics.jsonl", resume_step, has_rows=has_rows)
        self._timing = _reopen(folder / "timing.jsonl", resume_step, has_rows=has_rows)
        self._warned = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        timing = {key: value for key, value in metrics.items() if key.startswith("timing/")}
        self._write(self._metrics, {k: v for k, v in metrics.items() if k not in timing}, step)
        self._write(self._timing, timing, step)

    def sync(self) -> None:
        for file in (self._metrics, self._timing):
            with explain_disk_full(Path(file.name)):
                os.fsync(file.fileno())

    def close(self) -> None:
        for file in (self._metrics, self._timing):
            # A row that did not fit on a full disk was reported when it was written.
            with suppress(OSError):
                file.close()

    def _write(self, file: TextIO, metrics: Mapping[str, float], step: int) -> None:
        row: dict[str, float | None] = {"step": step}
        for key, value in sorted(metrics.items()):
            row[key] = float(value) if isfinite(value) else None
        not_finite = [key for key, value in row.items() if value is None]
        if not_finite and not self._warned:
            logger.warning(
                "step %d: %s is %s and is written as null; further cases are not reported",
                step,
                not_finite[0],
                metrics[not_finite[0]],
            )
            self._warned = True
        with explain_disk_full(Path(file.name)):
            file.write(json.dumps(row) + "\n")
            file.flush()


def _reopen(path: Path, resume_step: int | None, *, has_rows: bool) -> TextIO:
    if resume_step is None:
        write_atomically(path, b"")
        return path.open("a", encoding="utf-8")
    steps = [read_step(row) for row in truncate_rows(path, resume_step, one_per_step=True)]
    # A run that began from another run's checkpoint has no rows of the steps before it.
    missing = [
        step
        for step in find_missing(steps, resume_step)
        if (step > steps[0] if steps else has_rows)
    ]
    if missing:
        logger.warning(
            "%s has no row for %d of the steps before step %d, the first is step %d: the file was "
            "changed or damaged outside the run, which goes on without them",
            path,
            len(missing),
            resume_step + 1,
            missing[0],
        )
    return path.open("a", encoding="utf-8")


class TensorboardTracker:
    """TensorBoard event files."""

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard") from None
        self._event, self._summary = Event, Summary
        self._folder, self._writer = folder, EventFileWriter(str(folder))
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

    def sync(self) -> None:
        self._writer.flush()
        for path in self._folder.iterdir():
            sync_file(path)

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Any, step: int) -> None:
        event.step, event.wall_time = step, time.time()
        self._writer.add_event(event)


def _has_secrets(arguments: list[str]) -> bool:
    return redact_value(arguments) != arguments or any(redact(a) != a for a in arguments)


class WandbTracker:
    """Weights & Biases, online or offline as WANDB_MODE says.

    A resumed run becomes a new W&B run of the same name, because W&B does not rewrite history.
    """

    def __init__(
        self, folder: Path, *, project_name: str, run_name: str, config: Mapping[str, object]
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("wandb", "wandb") from None
        had_files = (folder / "wandb").exists()
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project_name,
                name=run_name,
                dir=folder,
                config=dict(config),
                # The metadata that W&B collects contain the command line.
                settings=wandb.Settings(x_disable_meta=_has_secrets(sys.argv)),
            )
        except wandb.Error as error:
            if not had_files:
                shutil.rmtree(folder / "wandb", ignore_errors=True)
            for path in created:
                with suppress(OSError):  # another process has put a file there since
                    path.rmdir()
            raise ConfigError(
                f"trainer.logger='wandb': {error} Or set WANDB_MODE=offline, or choose 'jsonl'"
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def sync(self) -> None:
        """W&B stores its rows itself."""

    def close(self) -> None:
        self._run.finish()
