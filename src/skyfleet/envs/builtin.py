"""Open the built-in environments, which live in `skyfleet.worlds`."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from skyfleet.config.root import RunConfig
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.users.factory import build_user_factory


def build_factory(config: RunConfig) -> EnvFactory:
    """Register the user's worlds and return the function that opens any of them."""
    # By name: skyfleet.worlds imports this package.
    catalog = import_module("skyfleet.worlds.catalog")
    for target in config.environment.worlds:
        catalog.add_world(target, key="environment.worlds")
    environment = config.environment
    return partial(
        catalog.open_world,
        partial_credit=environment.partial_reward,
        verifier=environment.verifier,
        make_user=build_user_factory(config),
    )
