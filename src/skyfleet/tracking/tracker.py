"""Tracker: where a step's numbers go, and how one is made from its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.jsonl import JsonlTracker
from skyfleet.tracking.tensorboard import TensorboardTracker
from skyfleet.tracking.wandb import WandbTracker

PACKAGES = {"console": None, "jsonl": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""What each tracker needs; its extra has the same name."""


class Tracker(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Called once a step, with steps that only grow."""
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
    total_steps: int | None = None,
) -> list[Tracker]:
    """One tracker a name, in that order; `resume_step` is the last step that counts."""
    check_trackers(names)
    # wandb first: without a login it refuses, and then no other has written anything.
    makers: dict[str, Callable[[], Tracker]] = {
        "wandb": lambda: WandbTracker(
            run_folder, project_name=project_name, run_name=run_name, config=config
        ),
        "tensorboard": lambda: TensorboardTracker(
            run_folder / "tensorboard", resume_step=resume_step
        ),
        "jsonl": lambda: JsonlTracker(run_folder, resume_step=resume_step),
        "console": lambda: ConsoleTracker(
            total_steps=total_steps, done_steps=max(resume_step or 0, 0)
        ),
    }
    trackers: dict[str, Tracker] = {}
    with ExitStack() as opened:
        for name in filter(names.__contains__, makers):
            trackers[name] = makers[name]()
            opened.callback(trackers[name].close)
        opened.pop_all()
    return [trackers[name] for name in dict.fromkeys(names)]


def check_trackers(names: Sequence[str]) -> None:
    """Refuses a name that is unknown, or whose package is not installed."""
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(f"trainer.logger={name!r}; choose from {sorted(PACKAGES)}")
        if (package := PACKAGES[name]) and find_spec(package) is None:
            raise MissingExtraError(package, package)
