"""Open the built-in environments, which live in `skyfleet.worlds`."""

from __future__ import annotations

from importlib import import_module

from skyfleet.config.root import RunConfig
from skyfleet.envs.env import EnvFactory


def build_factory(config: RunConfig) -> EnvFactory:
    """Register the user's worlds and return the function that opens any of them."""
    # By name: skyfleet.worlds imports this package.
    catalog = import_module("skyfleet.worlds.catalog")
    for target in config.environment.worlds:
        catalog.add_world(target, key="environment.worlds")
    factory: EnvFactory = (
        catalog.open_world_with_partial_credit
        if config.environment.partial_reward
        else catalog.open_world
    )
    return factory
