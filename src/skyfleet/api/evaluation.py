"""Evaluate a model on tasks, and roll out single episodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyfleet.api.background import run_sync
from skyfleet.api.comparison import Evaluation
from skyfleet.api.config import ConfigLike
from skyfleet.api.envs import ResolvedEnv, resolve_env
from skyfleet.api.inference import PolicyEngine, inference_config
from skyfleet.api.models import SCRIPTED, resolve_model
from skyfleet.api.settings import Sampling
from skyfleet.api.tasks import DEFAULT_ENV_KEY, as_task, load_given_tasks
from skyfleet.api.trajectories import Trajectory
from skyfleet.config.root import RunConfig
from skyfleet.config.rules import unsupported
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task

if TYPE_CHECKING:
    from skyfleet.envs.env import EnvFactory
    from skyfleet.evaluation.agent_info import AgentInfo
    from skyfleet.rollouts.conversation import AgentFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Playing:
    """An agent and the environment it plays in."""

    agent: AgentFactory
    info: AgentInfo
    step: int
    config: RunConfig
    open_env: EnvFactory


def evaluate(
    model: object,
    env: object = None,
    tasks: object = None,
    *,
    reward: Callable[..., Any] | None = None,
    attempts: int = 1,
    sampling: Sampling | None = None,
    name: str = "val",
    baselines: bool = True,
    pass_threshold: float = 1.0,
    output: str | Path | None = None,
    seed: int | None = None,
    config: ConfigLike = None,
) -> Evaluation:
    """Score a model, a policy, an endpoint or a scripted agent on tasks.

    `model` is a name, a folder, a run, a URL up to /v1, a policy, or "oracle", "null" or "random".
    One attempt per task is greedy; several are sampled at temperature 1 unless `sampling` says
    otherwise. `baselines` also plays an agent that does nothing, to find tasks that prove nothing.
    `output` is a folder for the report and the episodes.

    >>> import skyfleet as sf
    >>> env = sf.ToolEnv(reward=lambda answer: float("4" in answer))
    >>> sf.evaluate("null", env, [{"prompt": "What is 2 + 2?"}])
    Evaluation('val', step=0, 1 tasks, pass@1 0.000)
    """
    arguments = {
        name: value for name, value in locals().items() if name not in ("model", "env", "tasks")
    }
    return run_sync(evaluate_async(model, env, tasks, **arguments))


async def evaluate_async(
    model: object,
    env: object = None,
    tasks: object = None,
    *,
    reward: Callable[..., Any] | None = None,
    attempts: int = 1,
    sampling: Sampling | None = None,
    name: str = "val",
    baselines: bool = True,
    pass_threshold: float = 1.0,
    output: str | Path | None = None,
    seed: int | None = None,
    config: ConfigLike = None,
) -> Evaluation:
    """The async twin of `evaluate`, in the caller's event loop.

    >>> import asyncio, skyfleet as sf
    >>> env = sf.ToolEnv(reward=lambda answer: float("4" in answer))
    >>> asyncio.run(sf.evaluate_async("null", env, [{"prompt": "What is 2 + 2?"}])).success_rate
    0.0
    """
    resolved = resolve_env(env, reward, where="sf.evaluate", default_name=None)
    source = resolved.tasks if tasks is None else tasks
    if source is None:
        raise ConfigError("sf.evaluate(model, env, tasks): tasks is missing")
    loaded = load_given_tasks(source, env_key=resolved.env_key)
    if attempts > 1 and sampling is None:
        sampling = Sampling(temperature=1.0)
    keys = {"generator.eval_n_samples_per_prompt": attempts}
    if seed is not None:
        keys["trainer.seed"] = seed
    playing = _open(model, resolved, loaded, sampling, config, keys, where="sf.evaluate")
    async with playing as opened:
        return await _evaluate(
            name, loaded, opened, baselines=baselines, threshold=pass_threshold, output=output
        )


async def _evaluate(
    name: str,
    tasks: Sequence[Task],
    opened: _Playing,
    *,
    baselines: bool,
    threshold: float,
    output: str | Path | None,
) -> Evaluation:
    from skyfleet.envs.registry import is_elsewhere
    from skyfleet.evaluation.baselines import measure_baselines
    from skyfleet.evaluation.evaluate import evaluate as run_evaluation
    from skyfleet.evaluation.report import keep_evaluation, prepare_output
    from skyfleet.trainer.limits import build_limits
    from skyfleet.trajectories.trajectory import describe_ungraded

    config, limits = opened.config, build_limits(opened.config)
    if output is not None:
        prepare_output(Path(output), config, opened.info)
    measured = await measure_baselines(
        [task for task in tasks if baselines and not is_elsewhere(config, task.env_key)],
        opened.open_env,
        limits,
        max_concurrent=config.generator.max_num_seqs,
        pass_threshold=threshold,
    )
    report, groups = await run_evaluation(
        name,
        tasks,
        opened.open_env,
        opened.agent,
        limits,
        step=opened.step,
        n_samples=config.generator.eval_n_samples_per_prompt,
        max_concurrent=config.generator.max_num_seqs,
        baselines=measured,
        pass_threshold=threshold,
        played_by=opened.info,
    )
    if output is not None:
        keep_evaluation(Path(output), report, groups)
    episodes = [Trajectory.from_record(t) for group in groups for t in group.trajectories]
    ungraded = describe_ungraded(groups)
    return Evaluation(report, episodes, notes=[ungraded] if ungraded else [])


def rollout(
    model: object,
    env: object = None,
    task: Task | Mapping[str, Any] | None = None,
    *,
    reward: Callable[..., Any] | None = None,
    sampling: Sampling | None = None,
    config: ConfigLike = None,
) -> Trajectory:
    """Play one episode of a task.

    >>> import skyfleet as sf
    >>> env = sf.ToolEnv(reward=lambda answer: float("4" in answer))
    >>> sf.rollout("null", env, {"prompt": "What is 2 + 2?"}).reward
    0.0
    """
    return run_sync(
        rollout_async(model, env, task, reward=reward, sampling=sampling, config=config)
    )


async def rollout_async(
    model: object,
    env: object = None,
    task: Task | Mapping[str, Any] | None = None,
    *,
    reward: Callable[..., Any] | None = None,
    sampling: Sampling | None = None,
    config: ConfigLike = None,
) -> Trajectory:
    """The async twin of `rollout`, in the caller's event loop.

    >>> import asyncio, skyfleet as sf
    >>> env = sf.ToolEnv(reward=lambda answer: float("4" in answer))
    >>> asyncio.run(sf.rollout_async("null", env, {"prompt": "What is 2 + 2?"})).ending.value
    'done'
    """
    from skyfleet.rollouts.episode import run_episode
    from skyfleet.trainer.limits import build_limits

    resolved = resolve_env(env, reward, where="sf.rollout", default_name=None)
    if task is None:
        raise ConfigError("sf.rollout(model, env, task): task is missing")
    chosen = as_task(task)
    if resolved.env_key is not None and chosen.env_key == DEFAULT_ENV_KEY:
        chosen = chosen.model_copy(update={"env_key": resolved.env_key})
    playing = _open(model, resolved, [chosen], sampling, config, {}, where="sf.rollout")
    async with playing as opened:
        limits = build_limits(opened.config)
        played = await run_episode(chosen, opened.open_env, opened.agent, limits)
    return Trajectory.from_record(played)


@asynccontextmanager
async def _open(
    model: object,
    env: ResolvedEnv,
    tasks: Sequence[Task],
    sampling: Sampling | None,
    config: ConfigLike,
    arguments: Mapping[str, Any],
    *,
    where: str,
) -> AsyncIterator[_Playing]:
    """The agent that `model` names, ready to play; what was opened for it is closed."""
    from skyfleet.envs.registry import env_factory
    from skyfleet.evaluation.agent_info import AgentInfo

    keys = {**env.overrides, **arguments}
    # An environment given as an object is not what the configuration names.
    keys |= {"environment.env_class": "world"} if env.open_env is not None else {}
    keys |= (sampling or Sampling()).overrides("generator.eval_sampling_params")
    scripted = model if isinstance(model, str) and model in SCRIPTED else None
    if isinstance(model, PolicyEngine) and config is None:
        settings = inference_config(model.source, model.config, keys)
    else:
        source = resolve_model("tiny" if scripted else model, where=where)
        settings = inference_config(source, config, keys)
    open_env = env.open_env or env_factory(settings)
    turns = settings.generator.max_turns
    if scripted is not None:
        agent = _build_scripted(scripted, settings)
        info = AgentInfo(agent=scripted, max_turns=turns)
        yield _Playing(agent=agent, info=info, step=0, config=settings, open_env=open_env)
        return
    if refused := unsupported(settings):
        raise ConfigError("\n".join(refused))
    reused = isinstance(model, PolicyEngine) and config is None
    policy = model if isinstance(model, PolicyEngine) and reused else PolicyEngine(source, settings)
    try:
        by_sampling = await policy.connect(tasks, open_env)
        params = PolicyEngine(policy.source, settings).sampling_params(None)
        info = AgentInfo(
            model=policy.source.path or policy.source.name,
            endpoint=policy.source.url,
            temperature=params.temperature,
            max_turns=turns,
        )
        yield _Playing(
            agent=by_sampling(params),
            info=info,
            step=policy.source.step,
            config=settings,
            open_env=open_env,
        )
    finally:
        if policy is not model:
            await policy.aclose()


def _build_scripted(name: str, config: RunConfig) -> AgentFactory:
    from skyfleet.rollouts.random_agent import random_policy
    from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy

    if name == "random":
        return random_policy(seed=config.trainer.seed)
    return oracle_policy if name == "oracle" else null_policy
