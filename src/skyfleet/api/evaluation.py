"""Evaluate a model on tasks, and roll out single episodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from skyfleet.api.agents import OpenedAgent, open_agent
from skyfleet.api.arguments import check_arguments, show_arguments
from skyfleet.api.background import CallbackTasks, run_sync
from skyfleet.api.comparison import Evaluation
from skyfleet.api.config import ConfigLike
from skyfleet.api.envs import ResolvedEnv, resolve_env
from skyfleet.api.settings import Sampling, check_sampling
from skyfleet.api.tasks import DEFAULT_ENV_KEY, as_task, load_given_tasks
from skyfleet.api.trajectories import Trajectory
from skyfleet.errors import ConfigError
from skyfleet.storage.working_directory import anchor_path
from skyfleet.streams import open_stdout
from skyfleet.tasks.task import Task
from skyfleet.trajectories import trajectory as records

if TYPE_CHECKING:
    from typing import Unpack

    from skyfleet.rollouts.episode import OnMessages


class EvaluateArguments(TypedDict, total=False):
    """The keyword arguments of `evaluate` and `evaluate_async`."""

    reward: Callable[..., Any] | None
    """For single-turn tasks without an environment."""
    attempts: int | None
    """Per task: generator.eval_n_samples_per_prompt."""
    sampling: Sampling | None
    name: str | None
    """The name of the set in reports."""
    baselines: bool | None
    """Also play an agent that does nothing and the reference solutions, to find broken tasks. Unset,
    only in environments that run on this machine."""
    pass_threshold: float | None
    """The reward of a pass."""
    trained_envs: Collection[str] | None
    """Environments that the policy was trained on, for the report."""
    output: str | Path | None
    """A folder for the report and the episodes."""
    progress: bool | None
    """Unset, progress is shown on a terminal and in a notebook."""
    on_episode: Callable[[Trajectory], Any] | None
    seed: int | None
    config: ConfigLike


@show_arguments(EvaluateArguments)
def evaluate(
    model: object,
    env: object = None,
    tasks: object = None,
    **arguments: Unpack[EvaluateArguments],
) -> Evaluation:
    """Score a model, a policy, an endpoint or a scripted agent on tasks.

    model: a name, a folder, a run, a URL up to /v1, a policy, or "oracle", "null" or "random".
    env, tasks, reward, config: as for `sf.train`.
    attempts: per task. One is greedy; several are sampled at temperature 1 unless `sampling` says
        otherwise.
    baselines: also play an agent that does nothing and the reference solutions, to find tasks that
        prove nothing; unset, only in environments that run on this machine.
    output: a folder for the report and the episodes.

    >>> import skyfleet as sf
    >>> env = sf.ToolEnv(reward=lambda answer: float("4" in answer))
    >>> sf.evaluate("null", env, [{"prompt": "What is 2 + 2?"}])
    Evaluation('val', step=0, 1 tasks, pass@1 0.000)
    """
    return run_sync(evaluate_async(model, env, tasks, **arguments))


@show_arguments(EvaluateArguments)
async def evaluate_async(
    model: object,
    env: object = None,
    tasks: object = None,
    **arguments: Unpack[EvaluateArguments],
) -> Evaluation:
    """The async twin of `evaluate`, in the caller's event loop.

    >>> import asyncio, skyfleet as sf
    >>> env = sf.ToolEnv(reward=lambda answer: float("4" in answer))
    >>> asyncio.run(sf.evaluate_async("null", env, [{"prompt": "What is 2 + 2?"}])).success_rate
    0.0
    """
    evaluation = await evaluate_set(model, env, tasks, **arguments)
    evaluation.require_grades()
    return evaluation


async def evaluate_set(
    model: object, env: object, tasks: object, **arguments: Unpack[EvaluateArguments]
) -> Evaluation:
    """`evaluate_async` for one of several sets: without a single grade it raises nothing."""
    check_arguments("sf.evaluate", arguments, EvaluateArguments)
    if (output := arguments.get("output")) is not None:
        # Now, because an environment may change the working directory.
        arguments = {**arguments, "output": anchor_path(output)}
    resolved = resolve_env(env, arguments.get("reward"), where="sf.evaluate", default_name=None)
    source = resolved.eval_tasks if tasks is None else tasks
    if source is None:
        raise ConfigError("sf.evaluate(model, env, tasks): tasks is missing")
    loaded = load_given_tasks(source, env_key=resolved.env_key)
    attempts, sampling = arguments.get("attempts"), arguments.get("sampling")
    check_sampling("sf.evaluate", "sampling", sampling)
    if attempts is not None and attempts > 1 and (sampling is None or sampling.temperature is None):
        sampling = replace(sampling or Sampling(), temperature=1.0)
    given = {"generator.eval_n_samples_per_prompt": attempts, "trainer.seed": arguments.get("seed")}
    keys = {key: value for key, value in given.items() if value is not None}
    playing = open_agent(
        model, resolved, loaded, sampling, arguments.get("config"), keys, where="sf.evaluate"
    )
    async with playing as opened:
        return await _evaluate(loaded, resolved, opened, arguments)


async def _evaluate(
    tasks: Sequence[Task], env: ResolvedEnv, opened: OpenedAgent, arguments: EvaluateArguments
) -> Evaluation:
    from skyfleet.config.warnings import warn_greedy_evaluation
    from skyfleet.envs.registry import find_run_code, is_remote_env
    from skyfleet.evaluation.baselines import measure_baselines
    from skyfleet.evaluation.evaluate import evaluate as run_evaluation
    from skyfleet.evaluation.report import save_report
    from skyfleet.evaluation.score import PASS_THRESHOLD
    from skyfleet.trainer.limits import build_limits
    from skyfleet.trajectories.trajectory import describe_ungraded

    config, limits = opened.config, build_limits(opened.config)
    name, output = arguments.get("name") or "val", arguments.get("output")
    threshold = arguments.get("pass_threshold")
    threshold = PASS_THRESHOLD if threshold is None else threshold
    measured = arguments.get("baselines")
    baselines = await measure_baselines(
        [
            task
            for task in tasks
            if measured or (measured is None and not is_remote_env(config, task.env_key))
        ],
        opened.open_env,
        limits,
        max_concurrent=opened.max_concurrent,
        pass_threshold=threshold,
    )
    callbacks = CallbackTasks()
    with _keep_episodes(opened, name, len(tasks), arguments, callbacks) as keep:
        report, groups = await run_evaluation(
            name,
            tasks,
            opened.open_env,
            opened.agent,
            limits,
            step=opened.step,
            n_samples=config.generator.eval_n_samples_per_prompt,
            max_concurrent=opened.max_concurrent,
            trained_envs=arguments.get("trained_envs"),
            baselines=baselines,
            pass_threshold=threshold,
            agent_info=opened.info,
            grading_code=find_run_code(config, env.open_env),
            on_finished=keep,
        )
        await callbacks.settle()
    if output is not None:
        save_report(Path(output), report)
    episodes = [Trajectory.from_record(t) for group in groups for t in group.trajectories]
    notes = [ungraded] if (ungraded := describe_ungraded(groups)) else []
    if opened.info.agent == "policy":
        notes += warn_greedy_evaluation(config)
    return Evaluation(report, episodes, notes=notes, groups=groups)


@contextmanager
def _keep_episodes(
    opened: OpenedAgent,
    name: str,
    n_tasks: int,
    arguments: EvaluateArguments,
    callbacks: CallbackTasks,
) -> Iterator[Callable[[records.Trajectory], None]]:
    """What is called with each episode as it ends, so that an interruption loses none."""
    from skyfleet.evaluation.report import open_episodes, prepare_output
    from skyfleet.tracking.console import ConsoleTracker, in_notebook

    output, progress = arguments.get("output"), arguments.get("progress")
    on_episode = arguments.get("on_episode")
    with ExitStack() as closing:
        closing.callback(callbacks.cancel)
        archive = None
        if output is not None:
            prepare_output(Path(output), opened.config, opened.info)
            archive = closing.enter_context(open_episodes(Path(output), name, opened.step))
        advance: Callable[[], None] = lambda: None  # noqa: E731
        if progress or (progress is None and (open_stdout().isatty() or in_notebook())):
            console = ConsoleTracker()
            closing.callback(console.close)
            total = n_tasks * opened.config.generator.eval_n_samples_per_prompt
            advance = closing.enter_context(console.progress(f"evaluate {name}", total))

        def keep(trajectory: records.Trajectory) -> None:
            if archive is not None:
                archive.add(trajectory)
            advance()
            if on_episode is not None:
                callbacks.wrap(on_episode)(Trajectory.from_record(trajectory))

        yield keep


def rollout(
    model: object,
    env: object = None,
    task: Task | Mapping[str, Any] | None = None,
    *,
    reward: Callable[..., Any] | None = None,
    sampling: Sampling | None = None,
    on_messages: OnMessages | None = None,
    config: ConfigLike = None,
) -> Trajectory:
    """Play one episode of a task.

    on_messages: called with the prompt, then with each action and each reply, as they come.

    >>> import skyfleet as sf
    >>> env = sf.ToolEnv(reward=lambda answer: float("4" in answer))
    >>> sf.rollout("null", env, {"prompt": "What is 2 + 2?"}).reward
    0.0
    """
    return run_sync(
        rollout_async(
            model,
            env,
            task,
            reward=reward,
            sampling=sampling,
            on_messages=on_messages,
            config=config,
        )
    )


async def rollout_async(
    model: object,
    env: object = None,
    task: Task | Mapping[str, Any] | None = None,
    *,
    reward: Callable[..., Any] | None = None,
    sampling: Sampling | None = None,
    on_messages: OnMessages | None = None,
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
    check_sampling("sf.rollout", "sampling", sampling)
    if task is None:
        raise ConfigError("sf.rollout(model, env, task): task is missing")
    chosen = as_task(task)
    if resolved.env_key is not None and chosen.env_key == DEFAULT_ENV_KEY:
        chosen = chosen.model_copy(update={"env_key": resolved.env_key})
    playing = open_agent(model, resolved, [chosen], sampling, config, {}, where="sf.rollout")
    async with playing as opened:
        limits = build_limits(opened.config)
        played = await run_episode(
            chosen,
            opened.open_env,
            opened.agent,
            limits,
            on_messages=on_messages or (lambda _: None),
        )
    return Trajectory.from_record(played)
