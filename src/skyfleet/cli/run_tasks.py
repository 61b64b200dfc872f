"""The tasks behind a run's episodes, from the sources that its configuration names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from skyfleet.analysis.run_folder import RunFolder
    from skyfleet.tasks.task import Task
    from skyfleet.trajectories.entry import Entry

RunPath = Annotated[Path, typer.Argument(help="A run's folder, such as runs/local_tiny_cpu.")]


def tasks_of(run: RunFolder, entries: Iterable[Entry]) -> dict[str, Task]:
    """By key. Only the sources of the entries' sets are loaded, and of worlds only theirs."""
    from skyfleet.envs.registry import env_factory
    from skyfleet.trainer.tasks import load_sources

    env_factory(run.config)  # a world of your own is known from here on
    wanted = {(entry.set_name, entry.env_key) for entry in entries}
    # An archive's folder is named after its set without slashes.
    sets = {name.replace("/", "_"): sources for name, sources in run.config.data.eval_sets.items()}
    sets[""] = run.config.data.train_data
    tasks: dict[str, Task] = {}
    for set_name in sorted({name for name, _ in wanted} & sets.keys()):
        env_keys = {env_key for name, env_key in wanted if name == set_name}
        if sources := [source for source in sets[set_name] if _may_hold(source, env_keys)]:
            key = f"data.val_data.{set_name}" if set_name else "data.train_data"
            tasks |= {task.key: task for task in load_sources(sources, key=key)}
    return tasks


def _may_hold(source: str, env_keys: set[str]) -> bool:
    """Drawing a world's tasks takes seconds, so those of other worlds are left out."""
    name = source.removeprefix("world:").partition("?")[0]
    return not source.startswith("world:") or ":" in name or name in env_keys
