"""Trackers: write one row of metrics per step to the console, files and experiment trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, runtime_checkable

from skyfleet.config.tracking import Wandb
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.tracking.background import RunState
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.jsonl_tracker import JsonlTracker, read_rows_until
from skyfleet.tracking.mlflow_tracker import MlflowTracker
from skyfleet.tracking.tensorboard_tracker import TensorboardTracker
from skyfleet.tracking.trackio_tracker import TrackioTracker
from skyfleet.tracking.wandb_tracker import WandbTracker

PACKAGES = {
    "console": None,
    "jsonl": None,
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""The package that each tracker needs; its extra has the same name."""
UNCONSTRAINED = ("mlflow", "trackio")
"""Packages that need older versions of others than constraints.txt pins."""


class Tracker(Protocol):
    """Raises only for what the run cannot go on without: the rows in its own folder."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Called once per step; `step` only increases."""
        ...

    def sync(self) -> None:
        """Make the rows durable: called before a checkpoint that follows them is saved."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class RemoteTracker(Protocol):
    """A tracker that sends in the background, and needs time for the rest at the end of a run."""

    def finish(self, state: RunState = "finished") -> None:
        """Start to send the rest, and how the run ended. `close` waits for it, up to a deadline that begins here."""
        ...


@runtime_checkable
class FileTracker(Protocol):
    """A tracker that also stores files with a run; the others find them in the run folder."""

    def attach(self, name: str, text: str) -> None:
        """Store a text file, such as config.yaml, manifest.json or report.html."""
        ...


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
    wandb: Wandb | None = None,
) -> list[Tracker]:
    """Build one tracker per name, in that order; rows after `resume_step` are discarded.

    `has_rows`: the rows before it are in this folder, and a warning reports those that are not.
    """
    check_trackers(names)
    # Those that may refuse come first: then no other tracker has written a file yet.
    factories: dict[str, Callable[[], Tracker]] = {
        "wandb": lambda: WandbTracker(
            run_folder,
            project_name=project_name,
            run_name=run_name,
            config=config,
            resume_step=resume_step,
            settings=wandb or Wandb(),
        ),
        "mlflow": lambda: MlflowTracker(
            run_folder,
            project_name=project_name,
            run_name=run_name,
            config=config,
            resume_step=resume_step,
        ),
        "trackio": lambda: TrackioTracker(
            project_name=project_name, run_name=run_name, config=config, resume_step=resume_step
        ),
        "tensorboard": lambda: TensorboardTracker(
            run_folder / "tensorboard",
            resume_step=resume_step,
            rows_before=partial(read_rows_until, run_folder, resume_step),
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
            raise MissingExtraError(package, package, constrained=package not in UNCONSTRAINED)
