"""Package: the little of agentdojo that is needed, imported without every vendor's LLM client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from types import ModuleType
from typing import Any

import yaml

from skyfleet.errors import MissingExtraError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dojo:
    get_suites: Any
    function_call: Any
    runtime: Any
    executor: Any
    system: str
    """What AgentDojo tells an agent that is told nothing else."""


@cache
def load_dojo() -> Dojo:
    try:
        package = import_module("agentdojo")
        with _llm_clients_left_out(package):
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
def _llm_clients_left_out(package: ModuleType) -> Iterator[None]:
    """Stand-ins, for as long as this lasts, for the two modules that import the clients.

    The suites want from them a folder to be found in, and the name of an empty function.
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
