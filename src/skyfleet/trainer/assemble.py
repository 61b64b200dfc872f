"""Assemble: the one door through which configuration becomes objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from skyfleet.algorithms.advantages import Estimator
from skyfleet.algorithms.filters import FilterResult
from skyfleet.algorithms.losses.registry import build_policy_loss
from skyfleet.algorithms.sample import Sample
from skyfleet.checkpoints.checkpoint import Checkpoint, JsonPart, checkpoint_folder
from skyfleet.checkpoints.resume import load_checkpoint
from skyfleet.config.explain import flatten
from skyfleet.config.root import RunConfig
from skyfleet.config.rules import check_trainable
from skyfleet.config.warnings import remarks
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.registry import env_factory
from skyfleet.learner.critic import Critic
from skyfleet.learner.single import SingleLearner
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.sentinels.constant_metrics import constant_metrics
from skyfleet.sentinels.loss_recorder import LossRecorder
from skyfleet.sentinels.recording_engine import RecordingEngine
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.step_log import StepLog
from skyfleet.tracking.tracker import Tracker, make_trackers
from skyfleet.trainer.assemble_critic import assemble_critic
from skyfleet.trainer.assemble_engines import check_gpus
from skyfleet.trainer.assemble_evals import assemble_evals
from skyfleet.trainer.assemble_exports import build_exports
from skyfleet.trainer.assemble_learner import assemble_learner, build_estimator, build_filter
from skyfleet.trainer.assemble_policy import PolicyModel, build_sampling_params, load_policy_model
from skyfleet.trainer.assemble_sync import build_engine_offload, build_weight_sync
from skyfleet.trainer.assemble_tasks import RunTasks, assemble_tasks
from skyfleet.trainer.assemble_voice import open_policy_client
from skyfleet.trainer.assemble_watch import assemble_watch
from skyfleet.trainer.demonstrations import demonstrate
from skyfleet.trainer.limits import build_limits
from skyfleet.trainer.policy_client import PolicyClient
from skyfleet.trainer.preflight import check_names
from skyfleet.trainer.run import Run
from skyfleet.trainer.saving import parts
from skyfleet.trainer.schedule import Schedule
from skyfleet.trainer.state import TrainerState
from skyfleet.trajectories.trajectory import Group
from skyfleet.weight_sync.sync import WeightSync

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


async def assemble(
    config: RunConfig, *, checkpoint: Checkpoint | None = None, say: Say = lambda _: None
) -> Run:
    """`checkpoint` is what the run goes on from, instead of the weights that are configured.

    Whatever is refused is refused before the run's folder is touched. `say` is told what takes its
    time, before it is done.
    """
    check_trainable(config)
    for sentence in remarks(config):
        logger.warning("%s", sentence)
    # What is only named wrongly is said before minutes are spent on drawing tasks.
    open_env = env_factory(config)
    check_names(config)
    build_policy_loss(config.trainer.algorithm)
    starts_vllm = config.generator.backend == "vllm" and not config.generator.is_remote
    if starts_vllm:
        check_gpus(config, learns=True)
    state = TrainerState()
    if checkpoint:
        load_checkpoint(checkpoint, {"trainer": JsonPart(state)})
    say("reading the tasks to train on and to measure with")
    tasks = assemble_tasks(config)
    policy_folder = checkpoint.folder / "policy" if checkpoint else None
    say(f"making the policy: {policy_folder or config.trainer.policy.model.path}")
    # Saved adapters go on from the weights they were trained on, not from those merged with them.
    weights_folder = None if config.trainer.policy.model.lora.rank else policy_folder
    policy_model = await load_policy_model(
        config, tasks.train, open_env, policy_folder=weights_folder
    )
    # Before an engine starts: a reference may be named wrongly.
    learning = _learning(config, policy_model, state, total_steps=tasks.schedule.total_steps)
    warm = state.warm_start_step >= tasks.schedule.warm_start_steps
    demonstrations = (
        [] if warm else await _demonstrations(config, tasks, open_env, policy_model, say)
    )
    if starts_vllm:
        say("starting vLLM")
    async with AsyncExitStack() as opened:
        opening = open_policy_client(config, policy_model, folder=policy_folder, learns=True)
        policy_client = await opened.enter_async_context(opening)
        if checkpoint:
            _load(checkpoint, tasks, learning, policy_client)
        sync = build_weight_sync(config, policy_model, policy_client)
        if config.generator.is_remote:
            # Whoever started them gave them other weights, and so did the run before.
            say("handing the policy to the servers")
            await sync.push(learning.learner, policy_client.engines)
        resume_step = state.logged_step if checkpoint else None
        run = _run(
            config, tasks, open_env, policy_model, learning, policy_client, sync, resume_step
        )
        return replace(run, demonstrations=demonstrations, opened=opened.pop_all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Learning:
    state: TrainerState
    learner: SingleLearner
    critic: Critic | None
    losses: LossRecorder
    filter_groups: Callable[[Sequence[Group]], FilterResult]
    estimate: Estimator


def _learning(
    config: RunConfig, policy_model: PolicyModel, state: TrainerState, *, total_steps: int
) -> _Learning:
    checkpoints, losses = Path(config.trainer.ckpt_path), LossRecorder()
    critic = assemble_critic(config, policy_model, total_steps=total_steps)
    learner = assemble_learner(
        config,
        policy_model,
        lambda: checkpoint_folder(checkpoints, state.reference_step) / "policy",
        total_steps=total_steps,
        critic=critic,
        watched=losses.watched,
    )
    return _Learning(
        state=state,
        learner=learner,
        critic=critic,
        losses=losses,
        filter_groups=build_filter(config),
        estimate=build_estimator(config),
    )


def _load(
    checkpoint: Checkpoint, tasks: RunTasks, learning: _Learning, policy_client: PolicyClient
) -> None:
    learner = learning.learner
    load_checkpoint(checkpoint, parts(learning.state, learner, learning.critic, tasks.sampler))
    for engine in policy_client.engines:
        engine.policy_version = learner.policy_version


def _run(
    config: RunConfig,
    tasks: RunTasks,
    open_env: EnvFactory,
    policy_model: PolicyModel,
    learning: _Learning,
    policy_client: PolicyClient,
    sync: WeightSync,
    resume_step: int | None,
) -> Run:
    trainer, generator = config.trainer, config.generator
    witness, learner, envs = (
        RecordingEngine(policy_client.engine),
        learning.learner,
        tasks.trained_envs,
    )
    evals = assemble_evals(config, policy_client, tasks.eval_sets, envs)
    watch = assemble_watch(
        config,
        policy_model,
        policy_client,
        learner,
        envs=envs,
        witness=witness,
        losses=learning.losses,
        schedule=tasks.schedule,
    )
    # Behind all that may be named wrongly: they write in the run's folder.
    trackers = _trackers(config, resume_step=resume_step, schedule=tasks.schedule)
    console = next(tracker for tracker in trackers if isinstance(tracker, ConsoleTracker))
    for key, why in constant_metrics(config).items():
        console.note(f"{key} {why}")
    return Run(
        folder=Path(trainer.run_path),
        checkpoints=Path(trainer.ckpt_path),
        seed=trainer.seed,
        schedule=tasks.schedule,
        state=learning.state,
        sampler=tasks.sampler,
        evals=evals,
        open_env=open_env,
        policy=_policy_by_step(config, replace(policy_client, engine=witness)),
        limits=build_limits(config),
        n_samples=generator.n_samples_per_prompt,
        max_concurrent=generator.max_num_seqs,
        filter_groups=learning.filter_groups,
        estimate=learning.estimate,
        mask_unfinished=generator.apply_overlong_filtering,
        learner=learner,
        critic=learning.critic,
        engines=policy_client.engines,
        sync=sync,
        resting=build_engine_offload(config, policy_client),
        watch=watch,
        log=StepLog(*trackers),
        console=console,
        exports=build_exports(config, policy_model),
        warm_start_batch_size=trainer.warm_start.batch_size,
    )


async def _demonstrations(
    config: RunConfig, tasks: RunTasks, open_env: EnvFactory, policy_model: PolicyModel, say: Say
) -> list[Sample]:
    """What a warm start imitates; -1 shows it all tasks."""
    trainer, shown = config.trainer, list(tasks.train)
    if 0 <= trainer.warm_start.tasks < len(shown):
        shown = Random(trainer.seed).sample(shown, trainer.warm_start.tasks)
    say(f"playing {len(shown)} reference solutions to imitate")
    return await demonstrate(shown, open_env, policy_model.renderer, build_limits(config))


def _policy_by_step(
    config: RunConfig, policy_client: PolicyClient
) -> Callable[[int], AgentFactory]:
    def policy(step: int) -> AgentFactory:
        seed = config.trainer.seed * 1_000_003 + step
        return policy_client.policy(
            build_sampling_params(config.generator.sampling_params, seed=seed)
        )

    return policy


def _trackers(
    config: RunConfig, *, resume_step: int | None, schedule: Schedule
) -> Sequence[Tracker]:
    trainer = config.trainer
    return make_trackers(
        ["console", "jsonl", *(n for n in trainer.logger if n not in ("console", "jsonl"))],
        run_folder=Path(trainer.run_path),
        run_name=trainer.run_name,
        project_name=trainer.project_name,
        config=flatten(config),
        resume_step=resume_step,
        total_steps=schedule.total_steps,
    )
