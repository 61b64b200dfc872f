"""Registry: what `environment` names -> what opens an env for a task."""

from __future__ import annotations

import os
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

from skyfleet.config.environment import FleetTask
from skyfleet.config.imports import import_named
from skyfleet.config.root import RunConfig
from skyfleet.envs.context_env import with_context_tools
from skyfleet.envs.env import Env, EnvFactory
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task

ELSEWHERE = ("fleet_task", "openenv", "mcp")
"""Doors behind which every episode costs an instance of somebody's."""

_GRADING_SECONDS = 300

# Doors are imported where they are opened: most need packages of their own.


def env_factory(config: RunConfig) -> EnvFactory:
    """Opens each task's env by the class of its env_key, or else by the run's."""
    environment = config.environment
    default = _factory(environment.env_class, config, key="environment.env_class")
    special = {
        env_key: _factory(name, config, key=f"environment.env_classes.{env_key}")
        for env_key, name in environment.env_classes.items()
    }

    async def open_env(task: Task) -> Env:
        return await special.get(task.env_key, default)(task)

    return open_env


def is_elsewhere(config: RunConfig, env_key: str) -> bool:
    environment = config.environment
    return environment.env_classes.get(env_key, environment.env_class) in ELSEWHERE


def _factory(env_class: str, config: RunConfig, *, key: str) -> EnvFactory:
    environment = config.environment
    factory = _plain_factory(env_class, config, key=key)
    of_fleet = env_class == "fleet_task" and environment.skyrl_gym.fleet_task.enable_context_tools
    if environment.enable_context_tools or of_fleet:
        return with_context_tools(factory, max_output_chars=environment.max_output_chars)
    return factory


def _plain_factory(env_class: str, config: RunConfig, *, key: str) -> EnvFactory:
    """A registered name, or any `module:function` of your own."""
    if ":" in env_class:
        factory: EnvFactory = import_named(env_class, key=key)
        return factory
    if env_class not in ENV_CLASSES:
        near = get_close_matches(env_class, list(ENV_CLASSES), n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(ENV_CLASSES)}."
        raise ConfigError(
            f"{key}={env_class!r} is unknown; {hint} "
            "Or name a factory of your own as module:function"
        )
    return ENV_CLASSES[env_class](config)


def _world(config: RunConfig) -> EnvFactory:
    # By name: the built-in environments are content and import this package.
    catalog = import_module("skyfleet.worlds.catalog")
    for target in config.environment.worlds:
        catalog.add_world(target, key="environment.worlds")
    factory: EnvFactory = (
        catalog.open_world_for_parts if config.environment.partial_reward else catalog.open_world
    )
    return factory


def _fleet(config: RunConfig) -> EnvFactory:
    from skyfleet.envs.fleet.env import fleet_factory
    from skyfleet.envs.fleet.settings import FleetSettings

    asked = config.environment.skyrl_gym.fleet_task
    api_key = asked.api_key.get_secret_value() if asked.api_key else None
    return fleet_factory(
        FleetSettings(
            api_key=api_key or os.environ.get("FLEET_API_KEY", ""),
            ttl_seconds=_ttl_seconds(config),
            partial_reward=asked.partial_reward,
        )
    )


def _ttl_seconds(config: RunConfig) -> int:
    """An instance outlives its episode and the grading after it."""
    ttl_seconds = config.environment.skyrl_gym.fleet_task.ttl_seconds
    limit = config.generator.trajectory_timeout_seconds
    if ttl_seconds == FleetTask().ttl_seconds:
        return max(ttl_seconds, int(limit) + _GRADING_SECONDS)
    if ttl_seconds < limit:
        raise ConfigError(
            f"environment.skyrl_gym.fleet_task.ttl_seconds={ttl_seconds} is below "
            f"generator.trajectory_timeout_seconds={limit:g}: an instance would end before its "
            "episode; raise the one or lower the other"
        )
    return ttl_seconds


def _openenv(config: RunConfig) -> EnvFactory:
    from skyfleet.envs.openenv.client import openenv_factory
    from skyfleet.envs.openenv.session import OpenEnvSettings

    asked = config.environment.openenv
    if asked.base_url is None:
        raise ConfigError("environment.openenv.base_url is not set; write http://host:port")
    return openenv_factory(
        OpenEnvSettings(
            base_url=asked.base_url,
            message_timeout_seconds=asked.message_timeout_seconds,
            capacity_wait_seconds=asked.capacity_wait_seconds,
        )
    )


def _mcp(config: RunConfig) -> EnvFactory:
    from skyfleet.envs.mcp.client import MCPSettings, mcp_factory
    from skyfleet.envs.mcp.grading import by_function, by_url, by_verifier

    asked = config.environment.mcp
    if asked.reward is not None:
        grade = by_function(asked.reward)
    elif asked.grade_url is not None:
        grade = by_url(asked.grade_url)
    elif asked.seed_uri is not None and asked.current_uri is not None:
        grade = by_verifier(seed_uri=asked.seed_uri, current_uri=asked.current_uri)
    else:
        raise ConfigError(
            "environment.mcp says nothing of grades; set reward, or grade_url, "
            "or seed_uri and current_uri for the tasks' verifiers"
        )
    return mcp_factory(
        MCPSettings(
            url=asked.url,
            command=tuple(asked.command),
            headers={name: value.get_secret_value() for name, value in asked.headers.items()},
            environment={
                name: value.get_secret_value() for name, value in asked.environment.items()
            },
            call_timeout_seconds=asked.call_timeout_seconds,
            grade=grade,
        )
    )


def _skyrl_gym(config: RunConfig) -> EnvFactory:
    from skyfleet.envs.skyrl_gym import SkyrlGymSettings, skyrl_gym_factory

    asked = config.environment.skyrl_gym
    if asked.env_id is None:
        raise ConfigError("environment.skyrl_gym.env_id is not set; write a name such as gsm8k")
    return skyrl_gym_factory(
        SkyrlGymSettings(
            env_id=asked.env_id,
            max_turns=config.generator.max_turns,
            env_config=asked.env_config,
            max_env_workers=asked.max_env_workers,
        )
    )


def _agentdojo(config: RunConfig) -> EnvFactory:
    from skyfleet.envs.agentdojo.env import open_agentdojo

    return open_agentdojo


ENV_CLASSES: dict[str, Callable[[RunConfig], EnvFactory]] = {
    "world": _world,
    "fleet_task": _fleet,
    "openenv": _openenv,
    "mcp": _mcp,
    "skyrl_gym": _skyrl_gym,
    "agentdojo": _agentdojo,
}
