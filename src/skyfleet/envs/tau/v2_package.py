"""tau2's package: its domains, each loaded once from `TAU2_PATH`.

PyPI's `tau2` is a chemistry package and is never used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.tau.checkout import Checkout, Package, find_checkout, importing
from skyfleet.envs.tau.states import InitialModels
from skyfleet.envs.tau.v2_data import check_data, find_data_folder
from skyfleet.errors import ConfigError

PACKAGE = Package(
    name="tau2",
    repository="sierra-research/tau2-bench",
    variable="TAU2_PATH",
    source="src",
    required_file="environment/environment.py",
    hashed=("environment/*.py", "domains/**/*.py", "data_model/*.py", "evaluator/*.py"),
    needs=": pip install 'skyfleet[tau2]'",
    tested_commit="a2c024725189473d2d7cea3a5cfdbcc67478e41f",
    tested_fingerprint="e5ecb9f7330f16755f105b10c6f3e4c9de917c17a041277ea750764821d69ee6",
)
DOMAINS: Mapping[str, Sequence[str]] = {
    "airline": ("base", "train", "test"),
    "retail": ("base", "train", "test"),
    "telecom": ("base", "train", "test", "small", "full"),
    "mock": ("base",),
}
"""By domain its splits; base is the one that tau2 reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tau2:
    """The classes and functions of tau2 that the adapter calls."""

    message: Any
    tasks: Any
    action_evaluator: Any
    communicate_evaluator: Any
    user_simulator: Any
    system_prompt: str
    agent_instruction: str
    greeting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    name: str
    is_tested: bool
    package: Tau2
    system: str
    tools: tuple[ToolSpec, ...]
    user_tools: Mapping[str, ToolSpec]
    writing: frozenset[str]
    initial: InitialModels
    environment: Any
    """tau2's module of the domain's environment."""
    tasks: Mapping[str, Any]
    """All of the package's tasks by id."""
    splits: Mapping[str, Sequence[str]]
    """Ids of tasks."""

    def open(self) -> Any:
        """tau2's Environment with databases of its own."""
        databases = self.initial.copy()
        user = {"user_db": databases["user"]} if "user" in databases else {}
        return self.environment.get_environment(db=databases["agent"], **user)


@cache
def load_checkout() -> Checkout:
    return find_checkout(PACKAGE)


@cache
def load_package() -> tuple[Tau2, Path]:
    """Return tau2 and the data folder that it reads."""
    checkout = load_checkout()
    folder = find_data_folder(checkout.path)
    with suppress(ImportError):
        # It logs every call at debug level, and loguru prints that by default.
        import_module("loguru").logger.disable("tau2")
    with _variable("TAU2_DATA_DIR", str(folder)), importing(checkout):
        agent = import_module("tau2.agent.llm_agent")
        package = Tau2(
            message=import_module("tau2.data_model.message"),
            tasks=import_module("tau2.data_model.tasks"),
            action_evaluator=import_module("tau2.evaluator.evaluator_action").ActionEvaluator,
            communicate_evaluator=import_module(
                "tau2.evaluator.evaluator_communicate"
            ).CommunicateEvaluator,
            user_simulator=import_module("tau2.user.user_simulator").UserSimulator,
            system_prompt=agent.SYSTEM_PROMPT,
            agent_instruction=agent.AGENT_INSTRUCTION,
            greeting=import_module(
                "tau2.orchestrator.orchestrator"
            ).DEFAULT_FIRST_AGENT_MESSAGE.content,
        )
    return package, folder


@cache
def load_domain(name: str) -> Domain:
    check_domain(name)
    package, folder = load_package()
    check_data(name, folder)
    with importing(load_checkout()):
        module = import_module(f"tau2.domains.{name}.environment")
    environment = module.get_environment()
    databases = {"agent": environment.tools.db}
    user_tools = []
    if environment.user_tools is not None:
        databases["user"] = environment.user_tools.db
        user_tools = environment.get_user_tools()
    tools = environment.get_tools()
    kit = environment.tools
    return Domain(
        name=name,
        is_tested=load_checkout().is_tested,
        package=package,
        system=package.system_prompt.format(
            domain_policy=environment.get_policy(), agent_instruction=package.agent_instruction
        ),
        tools=tuple(map(_make_tool_spec, tools)),
        user_tools={tool.name: _make_tool_spec(tool) for tool in user_tools},
        writing=frozenset(tool.name for tool in tools if kit.tool_mutates_state(tool.name)),
        initial=InitialModels(databases),
        environment=module,
        tasks={task.id: task for task in module.get_tasks(None)},
        splits=module.get_tasks_split(),
    )


def check_domain(name: str) -> None:
    if name not in DOMAINS:
        raise ConfigError(f"tau2 has no domain {name!r}; choose from {', '.join(DOMAINS)}")


def _make_tool_spec(tool: Any) -> ToolSpec:
    function = tool.openai_schema["function"]
    return ToolSpec(
        name=function["name"],
        description=function["description"],
        parameters=function["parameters"],
    )


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside this block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
