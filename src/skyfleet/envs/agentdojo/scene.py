"""Scene: one episode's own copy of a suite's world, and what it was like before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.agentdojo.package import load_dojo
from skyfleet.errors import ConfigError

VERSION = "v1.2.2"
"""Of the benchmark, not of the package: the newest in 0.1.35."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    user_task: Any
    tools: tuple[ToolSpec, ...]
    runtime: Any
    before: Any
    now: Any


def find_suites(version: str) -> Mapping[str, Any]:
    suites: Mapping[str, Any] = load_dojo().get_suites(version)
    if not suites:
        raise ConfigError(f"AgentDojo has no version {version!r}; write one such as {VERSION}")
    return suites


def find_suite(name: str, version: str) -> Any:
    suites = find_suites(version)
    if name not in suites:
        raise ConfigError(f"AgentDojo has no suite {name!r}; choose from {', '.join(suites)}")
    return suites[name]


def set_scene(suite_name: str, version: str, user_task_id: str) -> Scene:
    suite = find_suite(suite_name, version)
    user_task = suite.user_tasks[user_task_id]
    now = user_task.init_environment(_untouched(suite_name, version).model_copy(deep=True))
    return Scene(
        user_task=user_task,
        tools=_tools(suite_name, version),
        runtime=load_dojo().runtime(suite.tools),
        before=now.model_copy(deep=True),
        now=now,
    )


@cache
def _untouched(suite_name: str, version: str) -> Any:
    """The suite's world with its harmless defaults where an injection would stand."""
    return find_suite(suite_name, version).load_and_inject_default_environment({})


@cache
def _tools(suite_name: str, version: str) -> tuple[ToolSpec, ...]:
    return tuple(
        ToolSpec(
            name=function.name,
            description=function.description,
            parameters=function.parameters.model_json_schema(),
        )
        for function in find_suite(suite_name, version).tools
    )
