"""Open what plays: a policy, an endpoint or a scripted agent, in its environment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyfleet.api.config import ConfigLike
from skyfleet.api.envs import ResolvedEnv, check_env_given
from skyfleet.api.inference import OpenedEngine, PolicyEngine, inference_config
from skyfleet.api.models import SCRIPTED, ModelSource, resolve_model
from skyfleet.api.settings import Sampling
from skyfleet.config.loading import config_from_python
from skyfleet.config.root import RunConfig
from skyfleet.config.validation import find_unsupported_values
from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    from skyfleet.envs.env import EnvFactory
    from skyfleet.evaluation.agent_info import AgentInfo
    from skyfleet.rollouts.conversation import AgentFactory
    from skyfleet.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedAgent:
    """An agent and the environment it plays in."""

    agent: AgentFactory
    info: AgentInfo
    step: int
    """The training step of its weights; 0 if they were not trained here."""
    config: RunConfig
    open_env: EnvFactory
    max_concurrent: int
    """Episodes at once: generator.max_num_seqs, or fewer if the engine's memory holds fewer."""


@asynccontextmanager
async def open_agent(
    model: object,
    env: ResolvedEnv,
    tasks: Sequence[Task],
    sampling: Sampling | None,
    config: ConfigLike,
    arguments: Mapping[str, Any],
    *,
    where: str,
) -> AsyncIterator[OpenedAgent]:
    """The agent that `model` names. A policy given as an object stays open for its owner."""
    from skyfleet.evaluation.agent_info import AgentInfo

    keys = {**env.overrides, **arguments}
    # An environment given as an object is not one that the configuration can name.
    keys |= {"environment.env_class": "world"} if env.open_env is not None else {}
    keys |= (sampling or Sampling()).overrides("generator.eval_sampling_params")
    if isinstance(model, str) and model in SCRIPTED:
        settings = inference_config(ModelSource(), config, keys)
        yield OpenedAgent(
            agent=_build_scripted(model, settings),
            info=AgentInfo(agent=model, max_turns=settings.generator.max_turns),
            step=0,
            config=settings,
            max_concurrent=settings.generator.max_num_seqs,
            open_env=env.open_env or _build_factory(where, settings, tasks),
        )
        return
    given = model if isinstance(model, PolicyEngine) and config is None else None
    if given is not None:
        source, settings = given.source, config_from_python(given.config, keys)
    else:
        source = resolve_model(model, where=where)
        settings = inference_config(source, config, keys)
    if source.url is None and (refused := find_unsupported_values(settings)):
        raise ConfigError("\n".join(refused))
    engine = given or PolicyEngine(source, settings)
    open_env = env.open_env or _build_factory(where, settings, tasks)
    try:
        opened = await engine.open(tasks, open_env)
        params = PolicyEngine(source, settings).sampling_params(None)
        yield OpenedAgent(
            agent=opened.agent(params),
            info=_describe_policy(source, settings, opened),
            step=opened.client.engine.policy_version if opened.client else 0,
            config=settings,
            open_env=open_env,
            max_concurrent=min(
                settings.generator.max_num_seqs,
                opened.client.max_num_seqs if opened.client else settings.generator.max_num_seqs,
            ),
        )
    finally:
        if given is None:
            await engine.aclose()


def _describe_policy(source: ModelSource, config: RunConfig, opened: OpenedEngine) -> AgentInfo:
    from skyfleet.evaluation.agent_info import AgentInfo

    generator, trained = config.generator, source.run_config
    step = opened.client.engine.policy_version if opened.client else 0
    return AgentInfo(
        model=opened.served_name or (trained.trainer.policy.model.path if trained else source.name),
        endpoint=source.url or ", ".join(generator.remote_inference_engine_urls) or None,
        checkpoint=str(source.folder) if source.folder else None,
        step=step if step and generator.is_remote else None,
        temperature=generator.eval_sampling_params.temperature,
        max_turns=generator.max_turns,
    )


def _build_scripted(name: str, config: RunConfig) -> AgentFactory:
    from skyfleet.rollouts.random_agent import random_policy
    from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy

    if name == "random":
        return random_policy(seed=config.trainer.seed)
    return oracle_policy if name == "oracle" else null_policy


def _build_factory(where: str, config: RunConfig, tasks: Sequence[Task]) -> EnvFactory:
    from skyfleet.envs.registry import env_factory
    from skyfleet.envs.verifiers.confinement import check_verifiers

    check_env_given(where, config, tasks)
    check_verifiers(config, tasks)
    return env_factory(config)
