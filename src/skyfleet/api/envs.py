"""Environments by name, agents as environments, and what `env=` may be."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from skyfleet.envs.env import Env, EnvFactory
from skyfleet.envs.python_env import ToolEnv, as_env_factory, check_reward
from skyfleet.envs.python_tools import name_function, requested_names
from skyfleet.errors import ConfigError
from skyfleet.tasks.from_objects import DEFAULT_ENV_KEY
from skyfleet.tasks.task import Task

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig
    from skyfleet.envs.agent_env import ApiCredentials

_SECTIONS = {
    "openenv": "environment.openenv",
    "mcp": "environment.mcp",
    "fleet_task": "environment.skyrl_gym.fleet_task",
    "openenv_fleet": "environment.skyrl_gym.fleet_task",
    "skyrl_gym": "environment.skyrl_gym",
    "world": "environment",
    "agentdojo": "environment",
    "bfcl": "environment",
}
"""The configuration section that each environment class reads its settings from."""

_TAU_SPLITS: Mapping[str, Mapping[str, tuple[str | None, str]]] = {
    "tau_bench": {"retail": ("train", "test"), "airline": (None, "test")},
    "tau2": {
        "airline": ("train", "test"),
        "retail": ("train", "test"),
        "telecom": ("train", "test"),
        "mock": (None, "base"),
    },
}
"""Splits to train and to evaluate on, by suite and domain."""

OBJECT_PREFIX = "python:"
"""How config.yaml names an environment that cannot be imported by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """An environment that a configuration can name, with its settings."""

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Configuration keys."""
    tasks: str | None = None
    """Where its own training tasks come from, if it has any."""
    eval_tasks: str | None = None
    """Where its own evaluation tasks come from; none of them are training tasks."""

    def __repr__(self) -> str:
        return f"env({self.name!r})"


def env(name: str, **settings: Any) -> EnvSpec:
    """An environment that exists: a built-in one, an adapter, or `module:function` of your own.

    Settings are keys of its configuration section: `sf.env("openenv", base_url=...)` sets
    environment.openenv.base_url. `sf.env("tau_bench", domain="retail")` has its own tasks.

    >>> import skyfleet as sf
    >>> sf.env("world:github").overrides
    {'environment.env_class': 'world'}
    >>> sf.env("openenv", base_url="http://localhost:8000").overrides["environment.openenv.base_url"]
    'http://localhost:8000'
    """
    env_class, colon, rest = name.partition(":")
    if env_class == "world" and colon:
        keys = {f"environment.{key}": value for key, value in settings.items()}
        is_chosen = "?" in name
        return EnvSpec(
            name=rest.partition("?")[0],
            overrides={"environment.env_class": "world", **keys},
            tasks=name if is_chosen else f"{name}?split=train&count=400",
            eval_tasks=name if is_chosen else f"{name}?split=unseen_tasks&count=120",
        )
    if colon:
        if get_close_matches(env_class, ["world"], cutoff=0.75) and find_spec(env_class) is None:
            raise ConfigError(f"env={name!r}: no such environment; did you mean world:{rest}?")
        if settings:
            raise ConfigError(
                f"sf.env({name!r}, {', '.join(settings)}=...): a function of your own takes its "
                "settings itself; pass the function as env="
            )
        return EnvSpec(name=rest, overrides={"environment.env_class": name})
    if env_class in ("tau_bench", "tau2"):
        return _name_tau_domain(env_class, **settings)
    if env_class not in _SECTIONS:
        # Any other name is an environment of skyrl-gym's registry, such as gsm8k.
        keys = {"env_class": "skyrl_gym", "skyrl_gym.env_id": name}
        keys |= {"skyrl_gym.env_config": settings} if settings else {}
        return EnvSpec(name=name, overrides={f"environment.{k}": v for k, v in keys.items()})
    section = _SECTIONS[env_class]
    keys = {f"{section}.{key}": value for key, value in settings.items()}
    return EnvSpec(name=name, overrides={"environment.env_class": env_class, **keys})


def _name_tau_domain(suite: str, domain: str = "retail", **settings: Any) -> EnvSpec:
    """Train on the train split and evaluate on the test split, where the domain has both."""
    splits = _TAU_SPLITS[suite]
    if domain not in splits:
        raise ConfigError(
            f"sf.env({suite!r}, domain={domain!r}): no such domain; choose from {', '.join(splits)}"
        )
    train, test = splits[domain]
    keys = {f"environment.tau_bench.{key}": value for key, value in settings.items()}
    return EnvSpec(
        name=domain if suite == "tau_bench" else f"{suite}-{domain}",
        overrides={"environment.env_class": suite, **keys},
        tasks=train and f"{suite}:{domain}?split={train}",
        eval_tasks=f"{suite}:{domain}?split={test}",
    )


class AgentEnv:
    """An agent written against OpenAI's API, as it is, as an environment to train in.

    `run(task, api)` plays one task: it makes a client with `api.base_url` and `api.key`, asks
    `api.model`, and returns a reward, a `Grade` or None. Each completion is a turn of the policy.
    `truncated_reward` is the reward of an attempt that the run's limits ended; None is unknown.

    >>> import skyfleet as sf
    >>> async def run(task, api):
    ...     from openai import AsyncOpenAI
    ...     messages = [{"role": "user", "content": task["prompt"]}]
    ...     async with AsyncOpenAI(base_url=api.base_url, api_key=api.key) as client:
    ...         answer = await client.chat.completions.create(model=api.model, messages=messages)
    ...     return float("4" in (answer.choices[0].message.content or ""))
    >>> env = sf.AgentEnv(run)
    >>> sf.rollout("null", env, {"prompt": "What is 2 + 2?"}).reward
    0.0
    """

    def __init__(
        self,
        run: Callable[[Any, ApiCredentials], Awaitable[Any]] | Callable[[Any, ApiCredentials], Any],
        *,
        truncated_reward: float | None = None,
    ) -> None:
        where = f"sf.AgentEnv({name_function(run)})"
        names = requested_names(run, ("task", "api"), where=where)
        if "api" not in names:
            raise ConfigError(f"{where}: it takes no api; without it the policy is never asked")
        self.run, self.truncated_reward, self._takes_task = run, truncated_reward, "task" in names
        self._factory: EnvFactory | None = None

    async def __call__(self, task: Task) -> Env:
        if self._factory is None:
            from skyfleet.envs.agent_env import agent_env

            solve = self._solve_async if inspect.iscoroutinefunction(self.run) else self._solve
            self._factory = agent_env(solve, truncated_reward=self.truncated_reward)
        return await self._factory(task)

    def __repr__(self) -> str:
        return f"AgentEnv({name_function(self.run)})"

    def _solve(self, task: Task, api: ApiCredentials) -> Any:
        given = {"task": task} if self._takes_task else {}
        return self.run(**given, api=api)  # type: ignore[call-arg]

    async def _solve_async(self, task: Task, api: ApiCredentials) -> Any:
        return await self._solve(task, api)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEnv:
    """What `env=` and `reward=` come to."""

    open_env: EnvFactory | None = None
    """None: the configuration's own."""
    env_key: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    tasks: str | None = None
    eval_tasks: str | None = None


def resolve_env(
    env_given: object, reward: Callable[..., Any] | None, *, where: str, default_name: str | None
) -> ResolvedEnv:
    """`where` is the call in error messages, such as `sf.train`."""
    if reward is not None and env_given is not None:
        raise ConfigError(
            f"{where}(env=..., reward=...): the environment has a reward of its own; pass one of them"
        )
    if reward is not None:
        check_reward(reward, where)
        return _resolve_object(ToolEnv(reward=reward, max_turns=1), where, default_name)
    if env_given is None:
        return ResolvedEnv()
    spec = env(env_given) if isinstance(env_given, str) else env_given
    if isinstance(spec, EnvSpec):
        return ResolvedEnv(
            overrides=spec.overrides,
            tasks=spec.tasks,
            eval_tasks=spec.eval_tasks,
            env_key=spec.name,
        )
    return _resolve_object(spec, where, default_name)


def check_env_given(where: str, config: RunConfig, tasks: Iterable[Task]) -> None:
    """ConfigError for a task that no argument, configuration or field of its own gives an env."""
    environment = config.environment
    if environment.env_class != "world" or DEFAULT_ENV_KEY in environment.env_classes:
        return
    if any(task.env_key == DEFAULT_ENV_KEY and task.env_class is None for task in tasks):
        raise ConfigError(f"{where}: the tasks name no environment; pass env= or reward=")


def _resolve_object(given: object, where: str, default_name: str | None) -> ResolvedEnv:
    factory = (
        given if isinstance(given, AgentEnv) else as_env_factory(given, where=f"{where}(env=)")
    )
    overrides: dict[str, Any] = {"environment.env_class": _name_object(given)}
    if isinstance(given, ToolEnv) and given.max_turns is not None:
        overrides["generator.max_turns"] = given.max_turns
    own_name = given.name if isinstance(given, ToolEnv) else None
    if inspect.isclass(given):
        own_name = given.__name__.lower()
    return ResolvedEnv(
        open_env=factory, env_key=own_name or default_name or "env", overrides=overrides
    )


def _name_object(given: object) -> str:
    """How config.yaml names it: `module:name` if it can be imported, else `python:name`."""
    name = getattr(given, "__qualname__", None) or type(given).__name__
    module = getattr(given, "__module__", "__main__")
    importable = hasattr(given, "__qualname__") and module != "__main__" and "<" not in name
    return f"{module}:{name}" if importable and "." not in name else f"{OBJECT_PREFIX}{name}"
