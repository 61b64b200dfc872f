"""Find the adapter that opens a task's environment by the names in the `environment` section.

An adapter is imported when a run first names it, because most need packages of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from importlib import import_module

from skyfleet.config.imports import import_named
from skyfleet.config.redaction import reject_missing_secrets
from skyfleet.config.root import RunConfig
from skyfleet.envs.context_env import with_context_tools
from skyfleet.envs.env import Env, EnvFactory
from skyfleet.envs.grading_code import GradingCode, find_grading_code
from skyfleet.envs.python_env import as_env_factory
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task

FactoryBuilder = Callable[[RunConfig], EnvFactory]

ENV_CLASSES: dict[str, str | FactoryBuilder] = {
    "world": "skyfleet.envs.builtin:build_factory",
    "fleet_task": "skyfleet.envs.fleet.env:build_factory",
    "openenv_fleet": "skyfleet.envs.fleet.openenv_env:build_factory",
    "openenv": "skyfleet.envs.openenv.client:build_factory",
    "mcp": "skyfleet.envs.mcp.client:build_factory",
    "skyrl_gym": "skyfleet.envs.skyrl_gym:build_factory",
    "agentdojo": "skyfleet.envs.agentdojo.env:build_factory",
    "tau_bench": "skyfleet.envs.tau.v1_env:build_factory",
    "tau2": "skyfleet.envs.tau.v2_env:build_factory",
    "bfcl": "skyfleet.envs.bfcl.env:build_factory",
}
"""Built-in adapters: the function that makes an EnvFactory from the run's config."""

_FLEET_CLASSES = ("fleet_task", "openenv_fleet")
REMOTE_ENV_CLASSES = (*_FLEET_CLASSES, "openenv", "mcp")
"""Adapters for which every episode occupies an instance on somebody's server."""


def env_factory(config: RunConfig) -> EnvFactory:
    """Return the factory of a run, which opens each task's environment by its class.

    `environment.env_classes` decides by env_key, then the task's own `env_class`, then
    `environment.env_class`.
    """
    environment = config.environment
    default = _build(environment.env_class, config, key="environment.env_class")
    by_env_key = {
        env_key: _build(name, config, key=f"environment.env_classes.{env_key}")
        for env_key, name in environment.env_classes.items()
    }
    by_row = {environment.env_class: default}

    async def open_env(task: Task) -> Env:
        factory = by_env_key.get(task.env_key)
        if factory is None:
            name = task.env_class or environment.env_class
            if name not in by_row:
                by_row[name] = _build_for_row(name, config, task)
            factory = by_row[name]
        return await factory(task)

    return open_env


def find_run_code(config: RunConfig, open_env: EnvFactory | None) -> GradingCode | None:
    """The user's code that plays and grades: that of `open_env`, or what the configuration names."""
    if open_env is not None:
        return find_grading_code(open_env)
    environment = config.environment
    classes = [environment.env_class, *environment.env_classes.values()]
    named = [name for name in classes if ":" in name]
    named += [world for world in environment.worlds if ":" in world]
    if "mcp" in classes and environment.mcp.reward is not None:
        named.append(environment.mcp.reward)
    if "skyrl_gym" in classes and ":" in (environment.skyrl_gym.env_id or ""):
        named.append(environment.skyrl_gym.env_id or "")
    return find_grading_code(*(import_named(name, key="environment") for name in named))


def check_task_classes(config: RunConfig, tasks: Iterable[Task]) -> None:
    """Raise ConfigError for a task whose own `env_class` cannot be opened, before a run starts."""
    checked = {config.environment.env_class}
    for task in tasks:
        name = task.env_class
        overridden = task.env_key in config.environment.env_classes
        if name is not None and name not in checked and not overridden:
            _build_for_row(name, config, task)
            checked.add(name)


def uses_fleet(config: RunConfig) -> bool:
    """Whether an environment of the run is Fleet's, which needs FLEET_API_KEY."""
    classes = {config.environment.env_class, *config.environment.env_classes.values()}
    return not classes.isdisjoint(_FLEET_CLASSES)


def is_remote_env(config: RunConfig, env_key: str) -> bool:
    """Whether episodes of this env_key run on somebody's server."""
    environment = config.environment
    return environment.env_classes.get(env_key, environment.env_class) in REMOTE_ENV_CLASSES


def _build_for_row(name: str, config: RunConfig, task: Task) -> EnvFactory:
    if ":" in name:
        # Rows are data: they choose among known environments and import no code.
        raise ConfigError(
            f"env_class={name!r} of task {task.key} names code; set environment.env_class, or "
            f"environment.env_classes.{task.env_key}, to it"
        )
    return _build(name, config, key=f"env_class of task {task.key}")


def _build(env_class: str, config: RunConfig, *, key: str) -> EnvFactory:
    environment = config.environment
    if env_class == "mcp":
        reject_missing_secrets("environment.mcp", environment.mcp)
    elif env_class == "openenv":
        reject_missing_secrets("environment.openenv", environment.openenv)
    elif env_class in ("skyrl_gym", *_FLEET_CLASSES) or env_class not in ENV_CLASSES:
        reject_missing_secrets("environment.skyrl_gym", environment.skyrl_gym)
    factory = _find_builder(env_class, key=key)(config)
    fleet_asks = (
        env_class in _FLEET_CLASSES and environment.skyrl_gym.fleet_task.enable_context_tools
    )
    if environment.enable_context_tools or fleet_asks:
        return with_context_tools(factory, max_output_chars=environment.max_output_chars)
    return factory


def _find_builder(env_class: str, *, key: str) -> FactoryBuilder:
    """Resolve a built-in adapter, an environment of skyrl-gym, or a user's `module:function`."""
    if ":" in env_class:
        factory = as_env_factory(import_named(env_class, key=key), where=key, spec=env_class)
        return lambda _: factory
    if env_class in ENV_CLASSES:
        builder = ENV_CLASSES[env_class]
        return _import_builder(builder) if isinstance(builder, str) else builder
    from skyfleet.envs import skyrl_gym

    gym_envs = skyrl_gym.list_registered()
    if env_class in gym_envs:
        return partial(skyrl_gym.build_factory, env_id=env_class)
    known = [*ENV_CLASSES, *gym_envs]
    near = get_close_matches(env_class, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}."
    missing = "" if gym_envs else " skyrl-gym's own, such as gsm8k, need the extra skyrl-gym."
    raise ConfigError(
        f"{key}={env_class!r} is unknown; {hint}{missing} "
        "Or name a factory of your own as module:function"
    )


def _import_builder(target: str) -> FactoryBuilder:
    module, _, name = target.partition(":")
    builder: FactoryBuilder = getattr(import_module(module), name)
    return builder
