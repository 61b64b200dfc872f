"""Wiring: build every component of a training run from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from skyfleet.algorithms.registry import build_policy_loss
from skyfleet.algorithms.sample import Sample
from skyfleet.algorithms.validation import correct_stale_samples
from skyfleet.checkpoints.checkpoint import (
    Checkpoint,
    JsonPart,
)
from skyfleet.checkpoints.resume import load_checkpoint
from skyfleet.cluster.cluster import Cluster, check_cluster, open_cluster
from skyfleet.config.keys import dump_yaml
from skyfleet.config.root import RunConfig
from skyfleet.engines.factory import build_engine_offload, check_gpus
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.registry import check_task_classes, env_factory, find_run_code
from skyfleet.envs.verifiers.confinement import check_verifiers
from skyfleet.learner.factory import copy_for_engine
from skyfleet.learner.policy_model import PolicyModel, choose_device
from skyfleet.models.loading import LoadedModel
from skyfleet.storage.bucket_lock import BucketLock
from skyfleet.storage.folder_lock import FolderLock
from skyfleet.tasks.task import Task
from skyfleet.trainer.build_run import build_run
from skyfleet.trainer.callbacks import Callbacks
from skyfleet.trainer.fit_memory import fit_training
from skyfleet.trainer.journal import Journal, choose_run_id
from skyfleet.trainer.learning import Learning, build_learning
from skyfleet.trainer.limits import build_limits
from skyfleet.trainer.load_policy import load_policy_model
from skyfleet.trainer.policy_client import PolicyClient, open_policy_client
from skyfleet.trainer.preflight import (
    check_references,
    check_trainable,
    find_training_warnings,
)
from skyfleet.trainer.refit_memory import fit_resumed, list_fitted_settings
from skyfleet.trainer.resuming import PLACE_KEYS
from skyfleet.trainer.run import Inference, Run, TrainerState, checkpoint_parts
from skyfleet.trainer.run_identity import check_code, hash_eval_sets, is_own_checkpoint
from skyfleet.trainer.sft import collect_demonstrations
from skyfleet.trainer.sharded_run import check_ranks
from skyfleet.trainer.tasks import RunTasks, drop_long_prompts, load_run_tasks
from skyfleet.weight_sync.sync import build_weight_sync, has_own_weights

logger = logging.getLogger(__name__)

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenObjects:
    """Components passed as Python objects; what is None is built from the configuration."""

    open_env: EnvFactory | None = None
    train_tasks: Sequence[Task] | None = None
    eval_sets: Mapping[str, Sequence[Task]] | None = None
    model: LoadedModel | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)


async def assemble(
    config: RunConfig,
    *,
    checkpoint: Checkpoint | None = None,
    given: GivenObjects | None = None,
    given_paths: Mapping[str, Any] | None = None,
    locks: Sequence[FolderLock | BucketLock] = (),
    on_progress: OnProgress = lambda _: None,
) -> Run:
    """Build the run; `checkpoint` replaces the configured weights with saved ones.

    All validation happens before the run directory is written. `on_progress` gets one line before
    every slow part. Trackers record the `given_paths` instead of the configuration's absolute ones.
    """
    given = given or GivenObjects()
    open_env = _check_config(config, given)
    state = TrainerState()
    if checkpoint:
        load_checkpoint(checkpoint, {"trainer": JsonPart(state)})
        fitted = fit_resumed(config, state.fitted_settings, model=given.model)
    else:
        fitted = fit_training(config, model=given.model)
    fitted.log_changes()
    fitted_settings = list_fitted_settings(config, fitted.config)
    recorded = dump_yaml(config, without=PLACE_KEYS)
    config = correct_stale_samples(fitted.config)
    tasks = _load_tasks(config, given, on_progress)
    resumes = is_own_checkpoint(checkpoint, Path(config.trainer.ckpt_path))
    eval_sets = hash_eval_sets(state.eval_sets if resumes else {}, tasks.eval_sets)
    grading_code = find_run_code(config, given.open_env)
    code_changed = resumes and check_code(state.grading_code, grading_code)
    policy_folder = checkpoint.folder / "policy" if checkpoint else None
    on_progress(f"loading the policy: {policy_folder or config.trainer.policy.model.path}")
    if checkpoint:  # read again after the first episodes, which may change the working directory
        checkpoint = replace(checkpoint, folder=checkpoint.folder.absolute())
        policy_folder = checkpoint.folder / "policy"
    # LoRA adapters are loaded onto the base weights, not onto weights merged with them.
    weights_folder = None if config.trainer.policy.model.lora.rank else policy_folder
    policy_model = await load_policy_model(
        config, tasks.train, open_env, policy_folder=weights_folder, model=given.model
    )
    tasks = drop_long_prompts(config, tasks, policy_model.renderer)
    warm = state.warm_start_step >= tasks.schedule.warm_start_steps
    demonstrations = (
        []
        if warm
        else await _collect_demonstrations(config, tasks, open_env, policy_model, on_progress)
    )
    if _starts_vllm(config):
        on_progress("starting vLLM")
    is_sharded = config.trainer.strategy == "fsdp"
    async with AsyncExitStack() as opened:
        cluster = await _open_cluster(config, open_env, given, opened, on_progress)
        has_copy = cluster is None and has_own_weights(config) and not is_sharded
        # Before an engine starts, because the reference may not load.
        learning = await build_learning(
            config,
            policy_model,
            state,
            tasks.schedule.total_steps,
            cluster,
            weights_folder=weights_folder,
            opened=opened,
            memory_plan=fitted.describe(),
        )
        policy_client = await opened.enter_async_context(
            open_policy_client(
                config,
                copy_for_engine(config, policy_model) if has_copy else policy_model,
                folder=policy_folder,
                learns=True,
                learner_bytes=fitted.learner_bytes,
                memory_plan=fitted.describe(),
                actors=cluster.make_engine_starter(config, policy_model, learning.learner)
                if cluster
                else None,
            )
        )
        if checkpoint:
            parts = checkpoint_parts(state, learning.learner, learning.critic, tasks.sampler)
            load_checkpoint(checkpoint, parts)
            for engine in policy_client.engines:
                engine.policy_version = learning.learner.policy_version
        state.fitted_settings, state.config = fitted_settings, recorded
        state.eval_sets = eval_sets
        state.grading_code = asdict(grading_code) if grading_code else {}
        state.run_id = choose_run_id(state.run_id, checkpoint, Path(config.trainer.ckpt_path))
        run = build_run(
            config,
            tasks,
            open_env,
            policy_model,
            learning,
            policy_client,
            await _connect_inference(
                config, policy_model, policy_client, learning, cluster, on_progress
            ),
            given.callbacks,
            Journal.from_config(config, state.run_id, checkpoint),
            grading_code,
            cluster,
            resume_step=state.logged_step if checkpoint else None,
            given_paths=given_paths or {},
        )
        if code_changed:
            run.journal.remove_after(state.step)  # these episodes have grades of the earlier code
        warm_start = replace(run.warm_start, demonstrations=demonstrations)
        return replace(run, warm_start=warm_start, locks=locks, opened=opened.pop_all())


def _check_config(config: RunConfig, given: GivenObjects) -> EnvFactory:
    """Everything that can be checked before tasks are generated, which can take minutes."""
    check_trainable(config)
    if not config.trainer.placement.use_ray:
        check_ranks(config)
    for sentence in find_training_warnings(config):
        logger.warning("%s", sentence)
    open_env = given.open_env or env_factory(config)
    check_references(config, model_is_given=given.model is not None)
    build_policy_loss(config.trainer.algorithm)
    if config.trainer.placement.use_ray:
        check_cluster(config, uses_gpus=_uses_gpus(config))
    elif _starts_vllm(config):
        check_gpus(config, learns=True)
    return open_env


def _uses_gpus(config: RunConfig) -> bool:
    return choose_device(config.trainer.device).type == "cuda"


async def _open_cluster(
    config: RunConfig,
    open_env: EnvFactory,
    given: GivenObjects,
    opened: AsyncExitStack,
    on_progress: OnProgress,
) -> Cluster | None:
    """Ray's actors, closed with `opened`; None without `trainer.placement.use_ray`."""
    if not config.trainer.placement.use_ray:
        return None
    on_progress("starting Ray")
    return await opened.enter_async_context(
        open_cluster(
            config,
            check_cluster(config, uses_gpus=_uses_gpus(config)),
            open_env,
            env_is_given=given.open_env is not None,
            on_progress=on_progress,
        )
    )


def _starts_vllm(config: RunConfig) -> bool:
    return config.generator.backend == "vllm" and not config.generator.is_remote


def _load_tasks(config: RunConfig, given: GivenObjects, on_progress: OnProgress) -> RunTasks:
    on_progress("loading the training and evaluation tasks")
    tasks = load_run_tasks(config, train_tasks=given.train_tasks, eval_sets=given.eval_sets)
    if given.open_env is None:
        check_task_classes(config, tasks.all)
        check_verifiers(config, tasks.all)
    return tasks


async def _connect_inference(
    config: RunConfig,
    policy_model: PolicyModel,
    policy_client: PolicyClient,
    learning: Learning,
    cluster: Cluster | None,
    on_progress: OnProgress,
) -> Inference:
    actors = None if cluster is None else cluster.actors
    inference = Inference(
        engines=policy_client.engines,
        sync=build_weight_sync(
            config, policy_model.loaded.module, policy_client.engine, learning.learner
        )
        if actors is None
        else actors.make_sync(learning.learner, policy_client.engine),
        offload=build_engine_offload(config, policy_client.engine),
    )
    if config.generator.is_remote:
        # Remote servers hold other weights: their own, or those of an earlier run.
        on_progress("pushing the policy to the servers")
    if config.generator.is_remote or has_own_weights(config) or actors is not None:
        await inference.push(learning.learner)
    return inference


async def _collect_demonstrations(
    config: RunConfig,
    tasks: RunTasks,
    open_env: EnvFactory,
    policy_model: PolicyModel,
    on_progress: OnProgress,
) -> list[Sample]:
    """Samples for the warm start, of `warm_start.tasks` tasks; -1 means all."""
    trainer, chosen = config.trainer, list(tasks.train)
    if 0 <= trainer.warm_start.tasks < len(chosen):
        chosen = Random(trainer.seed).sample(chosen, trainer.warm_start.tasks)
    on_progress(f"rolling out {len(chosen)} reference solutions for the warm start")
    return await collect_demonstrations(
        chosen, open_env, policy_model.renderer, build_limits(config)
    )
