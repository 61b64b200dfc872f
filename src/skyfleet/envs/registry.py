"""Registry: the name in `environment.env_class` -> what opens an env for a task."""

from __future__ import annotations

from difflib import get_close_matches

from skyfleet.config.imports import import_named
from skyfleet.envs.env import EnvFactory
from skyfleet.errors import ConfigError

# "module:function", imported on first use: a room's doors may need packages of their own.
ENV_CLASSES: dict[str, str] = {"world": "skyfleet.envs.worlds.catalog:open_world"}


def env_factory(env_class: str) -> EnvFactory:
    """A registered name, or any `module:function` of your own."""
    target = ENV_CLASSES.get(env_class, env_class)
    if ":" not in target:
        near = get_close_matches(env_class, list(ENV_CLASSES), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {sorted(ENV_CLASSES)}"
        raise ConfigError(
            f"environment.env_class={env_class!r} is unknown; {hint} "
            "Or name a factory of your own as module:function"
        )
    factory: EnvFactory = import_named(target, key="environment.env_class")
    return factory
