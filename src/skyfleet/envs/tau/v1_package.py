"""tau-bench's package: its domains, each loaded once from `TAU_BENCH_PATH`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.tau.checkout import Checkout, Package, find_checkout, importing
from skyfleet.envs.tau.states import InitialTables
from skyfleet.errors import ConfigError

PACKAGE = Package(
    name="tau_bench",
    repository="sierra-research/tau-bench",
    variable="TAU_BENCH_PATH",
    source=".",
    required_file="envs/base.py",
    hashed=("types.py", "envs/*.py", "envs/**/*.py", "envs/**/*.json", "envs/**/*.md"),
    tested_commit="59a200c6d575d595120f1cb70fea53cef0632f6b",
    tested_fingerprint="e440d5d05026af4539b87355e16b3fdf7703ae4c82b3d428b463f3bef942fa11",
)

SPLITS: Mapping[str, Sequence[str]] = {"retail": ("test", "train", "dev"), "airline": ("test",)}
"""By domain."""

_NO_MODEL = ("human", "none")
"""The package's user that needs no model; it is never asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A domain of tau-bench, shared by all its episodes."""

    name: str
    is_tested: bool
    system: str
    """The policy, which tau-bench's agents have as their system message."""
    tools: tuple[ToolSpec, ...]
    ending_tools: frozenset[str]
    initial: InitialTables
    tasks: Mapping[str, Sequence[Any]]
    """The package's tasks by split."""
    env_class: Any
    """tau-bench's Env."""
    env_arguments: Mapping[str, Any]
    action_class: Any
    task_class: Any

    def open(self, task: Any) -> Any:
        """tau-bench's Env for one task, with a database of its own. No tool of it ends the episode,
        because that would compute its reward."""
        strategy, model = _NO_MODEL
        return self.env_class(
            data_load_func=self.initial.copy,
            tasks=[task],
            task_index=0,
            user_strategy=strategy,
            user_model=model,
            **self.env_arguments,
        )


@cache
def load_checkout() -> Checkout:
    return find_checkout(PACKAGE)


@cache
def load_domain(name: str) -> Domain:
    check_domain(name)
    checkout = load_checkout()
    with importing(checkout):
        base = import_module("tau_bench.envs.base")
        types = import_module("tau_bench.types")
        module = import_module(f"tau_bench.envs.{name}.env")
        loader = import_module(f"tau_bench.envs.{name}.data")
        try:
            tables = loader.load_data()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"TAU_BENCH_PATH={checkout.path}: the data of {name} cannot be loaded ({error}); "
                "check the clone out again"
            ) from error
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, base.Env) and value is not base.Env
        ]
        strategy, model = _NO_MODEL
        envs = {
            split: classes[0](
                user_strategy=strategy, user_model=model, task_split=split, task_index=0
            )
            for split in SPLITS[name]
        }
    first = next(iter(envs.values()))
    return Domain(
        name=name,
        is_tested=checkout.is_tested,
        system=first.wiki,
        tools=tuple(map(_make_tool_spec, first.tools_info)),
        ending_tools=frozenset(first.terminate_tools),
        initial=InitialTables(tables, lambda record: str(base.to_hashable(record))),
        tasks={split: tuple(env.tasks) for split, env in envs.items()},
        env_class=base.Env,
        env_arguments={
            "tools": list(first.tools_map.values()),
            "wiki": first.wiki,
            "rules": first.rules,
        },
        action_class=types.Action,
        task_class=types.Task,
    )


def check_domain(name: str) -> None:
    if name not in SPLITS:
        raise ConfigError(f"tau-bench has no domain {name!r}; choose from {', '.join(SPLITS)}")


def check_split(domain: str, split: str) -> None:
    if split not in SPLITS[domain]:
        raise ConfigError(
            f"tau-bench's {domain} has no split {split!r}; choose from {', '.join(SPLITS[domain])}"
        )


def _make_tool_spec(info: Mapping[str, Any]) -> ToolSpec:
    function = info["function"]
    return ToolSpec(
        name=function["name"],
        description=function["description"],
        parameters=function["parameters"],
    )
