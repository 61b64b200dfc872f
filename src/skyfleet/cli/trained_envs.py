"""Which environments a configuration trains on, told without drawing their tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyfleet.errors import ConfigError, SkyfleetError

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig


def trained_envs_of(config: RunConfig) -> tuple[frozenset[str] | None, list[str]]:
    """As training would have it; None, and why, where nothing says what is trained on."""
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
                # Its name is enough: drawing thousands of tasks takes seconds.
                world = address.removeprefix("world:")
                known.add(add_world(world, key="data.train_data").name if ":" in world else world)
            else:
                known |= {task.env_key for task in load_sources([source], key="data.train_data")}
        if unknown := sorted(set(data.env_filter) - known):
            raise ConfigError(f"data.env_filter names {unknown[0]!r}, which is not among them")
    except (SkyfleetError, OSError) as error:
        return None, [
            f"No environment is marked as trained or held out, for data.train_data does not say: {error}"
        ]
    trained = known & set(data.env_filter) if data.env_filter else known
    return frozenset(trained), []
