"""Tracker: where a step's numbers go, and how one is made from its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from skyfleet.errors import ConfigError
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.jsonl import JsonlTracker
from skyfleet.tracking.tensorboard import TensorboardTracker
from skyfleet.tracking.wandb import WandbTracker


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
    makers: dict[str, Callable[[], Tracker]] = {
        "console": lambda: ConsoleTracker(
            total_steps=total_steps, done_steps=max(resume_step or 0, 0)
        ),
        "jsonl": lambda: JsonlTracker(run_folder, resume_step=resume_step),
        "tensorboard": lambda: TensorboardTracker(
            run_folder / "tensorboard", resume_step=resume_step
        ),
        "wandb": lambda: WandbTracker(
            run_folder, project_name=project_name, run_name=run_name, config=config
        ),
    }
    for name in names:
        if name not in makers:
            raise ConfigError(f"trainer.logger={name!r}; choose from {sorted(makers)}")
    with ExitStack() as opened:
        trackers = []
        for name in names:
            trackers.append(makers[name]())
            opened.callback(trackers[-1].close)
        opened.pop_all()
    return trackers
