"""Load AgentDojo's suites without its LLM clients, and create the state of one episode."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from types import ModuleType
from typing import Any

import yaml

from skyfleet.chat.message import ToolSpec
from skyfleet.errors import ConfigError, MissingExtraError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dojo:
    get_suites: Any
    function_call: Any
    runtime: Any
    executor: Any
    system: str
    """AgentDojo's default system message."""


@cache
def load_dojo() -> Dojo:
    try:
        package = import_module("agentdojo")
        with _without_llm_clients(package):
            from agentdojo.agent_pipeline.tool_execution import ToolsExecutor
            from agentdojo.functions_runtime import FunctionCall, FunctionsRuntime
            from agentdojo.task_suite.load_suites import get_suites
    except ImportError as error:
        raise MissingExtraError("agentdojo", "agentdojo") from error
    messages = (files("agentdojo") / "data" / "system_messages.yaml").read_text()
    return Dojo(
        get_suites=get_suites,
        function_call=FunctionCall,
        runtime=FunctionsRuntime,
        executor=ToolsExecutor(),
        system=yaml.safe_load(messages)["default"],
    )


@contextmanager
def _without_llm_clients(package: ModuleType) -> Iterator[None]:
    """Replace the two modules that import the clients by stand-ins inside this block.

    The suites need only a package path from the one and a constant from the other.
    """
    pipeline = ModuleType("agentdojo.agent_pipeline")
    pipeline.__path__ = [f"{folder}/agent_pipeline" for folder in package.__path__]
    google = ModuleType("agentdojo.agent_pipeline.llms.google_llm")
    vars(google)["EMPTY_FUNCTION_NAME"] = "<empty-function-name>"
    absent = [module for module in (pipeline, google) if module.__name__ not in sys.modules]
    sys.modules.update({module.__name__: module for module in absent})
    try:
        yield
    finally:
        for module in absent:
            del sys.modules[module.__name__]


VERSION = "v1.2.2"
"""The version of the benchmark, not of the package: the newest in 0.1.35."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteState:
    """One episode's copy of a suite's state, and its initial state."""

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


def load_suite_state(suite_name: str, version: str, user_task_id: str) -> SuiteState:
    suite = find_suite(suite_name, version)
    user_task = suite.user_tasks[user_task_id]
    now = user_task.init_environment(_load_initial_state(suite_name, version).model_copy(deep=True))
    return SuiteState(
        user_task=user_task,
        tools=_build_tools(suite_name, version),
        runtime=load_dojo().runtime(suite.tools),
        before=now.model_copy(deep=True),
        now=now,
    )


@cache
def _load_initial_state(suite_name: str, version: str) -> Any:
    """Load the suite's state with its harmless defaults in place of injections."""
    return find_suite(suite_name, version).load_and_inject_default_environment({})


@cache
def _build_tools(suite_name: str, version: str) -> tuple[ToolSpec, ...]:
    return tuple(
        ToolSpec(
            name=function.name,
            description=function.description,
            parameters=function.parameters.model_json_schema(),
        )
        for function in find_suite(suite_name, version).tools
    )
