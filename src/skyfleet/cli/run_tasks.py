"""The tasks and trained environments of a run, from its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from skyfleet.analysis.run_folder import RunFolder
    from skyfleet.tasks.task import Task
    from skyfleet.trajectories.entry import Entry
from typing import TYPE_CHECKING

from skyfleet.errors import ConfigError, SkyfleetError

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig


RunPath = Annotated[
    str, typer.Argument(help="A run's folder, such as runs/local_tiny_cpu, or its s3:// address.")
]


def load_episode_tasks(run: RunFolder, entries: Iterable[Entry]) -> dict[str, Task]:
    """Tasks by key, from the sources of the entries' sets only."""
    from skyfleet.envs.registry import env_factory
    from skyfleet.trainer.tasks import load_sources

    check_named_env(run)
    env_factory(run.config)  # registers user-defined worlds
    wanted = {(entry.set_name, entry.env_key) for entry in entries}
    # Folder names of sets have no slashes.
    sets = {name.replace("/", "_"): sources for name, sources in run.config.data.eval_sets.items()}
    sets[""] = run.config.data.train_data
    tasks: dict[str, Task] = {}
    for set_name in sorted({name for name, _ in wanted} & sets.keys()):
        env_keys = {env_key for name, env_key in wanted if name == set_name}
        if sources := [source for source in sets[set_name] if _may_hold(source, env_keys)]:
            key = f"data.val_data.{set_name}" if set_name else "data.train_data"
            tasks |= {task.key: task for task in load_sources(sources, key=key)}
    return tasks


def check_named_env(run: RunFolder) -> None:
    """ConfigError if the environment was an object of the process that trained the run."""
    name = run.config.environment.env_class
    if name.startswith("python:"):
        raise ConfigError(
            f"{run.path} was trained in {name.removeprefix('python:')}, an object of the script that "
            "started it, which cannot be opened here; define the environment as a function or a "
            "class of a module, so that config.yaml names it, and train again"
        )


def _may_hold(source: str, env_keys: set[str]) -> bool:
    """Generating a world's tasks takes seconds, so other worlds are skipped."""
    name = source.removeprefix("world:").partition("?")[0]
    return not source.startswith("world:") or ":" in name or name in env_keys


def find_trained_envs(config: RunConfig) -> tuple[frozenset[str] | None, list[str]]:
    """The trained environments; None and the reason if the configuration does not say."""
    from skyfleet.trainer.tasks import load_sources
    from skyfleet.worlds.catalog import add_world

    data = config.data
    if not data.train_data:
        return None, []
    known: set[str] = set()
    try:
        for source in data.train_data:
            address = source.partition("?")[0]
            if address.startswith("world:"):
                # The name is enough: generating thousands of tasks takes seconds.
                world = address.removeprefix("world:")
                known.add(add_world(world, key="data.train_data").name if ":" in world else world)
            else:
                known |= {task.env_key for task in load_sources([source], key="data.train_data")}
        if unknown := sorted(set(data.env_filter) - known):
            raise ConfigError(f"data.env_filter={unknown[0]!r} is not among them")
    except (SkyfleetError, OSError) as error:
        return None, [
            f"No environment is marked as trained or held out, because data.train_data cannot be read: {error}"
        ]
    trained = known & set(data.env_filter) if data.env_filter else known
    return frozenset(trained), []


def check_eval_verifiers(config: RunConfig, sets: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError if a verifier in the files of the sets would run here unconfined."""
    from skyfleet.envs.verifiers.confinement import check_verifiers
    from skyfleet.tasks.sources import is_file
    from skyfleet.trainer.tasks import load_sources

    for name, sources in sets.items():
        for source in filter(is_file, sources):
            check_verifiers(config, load_sources([source], key=f"data.val_data.{name}"))
