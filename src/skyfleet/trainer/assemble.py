"""Assemble: the one door through which configuration becomes objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from skyfleet.config.explain import flatten
from skyfleet.config.root import RunConfig
from skyfleet.config.rules import unsupported
from skyfleet.envs.registry import env_factory
from skyfleet.errors import ConfigError
from skyfleet.models.loading import check_model_path
from skyfleet.rollouts.conversation import Policy
from skyfleet.sentinels.loss_witness import LossWitness
from skyfleet.sentinels.witness import Witness
from skyfleet.tasks.curriculum_sampling import CurriculumSampler
from skyfleet.tasks.sampling import Sampler, TaskSampler
from skyfleet.tasks.task import Task
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.step_log import StepLog
from skyfleet.tracking.tracker import make_trackers
from skyfleet.trainer.assemble_evals import assemble_evals
from skyfleet.trainer.assemble_learner import assemble_learner, estimate_of, sift_of
from skyfleet.trainer.assemble_policy import assemble_speaker, sampling_of
from skyfleet.trainer.assemble_watch import assemble_watch, still_metrics_of
from skyfleet.trainer.demonstrations import demonstrate
from skyfleet.trainer.limits import limits_of
from skyfleet.trainer.run import Run
from skyfleet.trainer.sources import load_sources
from skyfleet.trainer.state import TrainerState
from skyfleet.trainer.tasks import check_apart, schedule_of, training_tasks
from skyfleet.weight_sync.sync import InProcessSync


async def assemble(
    config: RunConfig, *, policy_folder: Path | None = None, resume_step: int | None = None
) -> Run:
    """`policy_folder` holds weights to go on from, instead of what the configuration names.

    `resume_step` is the last step whose metrics count; None starts the metrics afresh.
    """
    if gaps := unsupported(config):
        raise ConfigError("\n".join(gaps))
    trainer, generator = config.trainer, config.generator
    checkpoints = Path(trainer.ckpt_path)
    # What is only named wrongly is said before minutes are spent on drawing tasks.
    open_env = env_factory(config)
    check_model_path(trainer.policy.model.path)
    train_tasks = training_tasks(config)
    eval_sets = {
        name: load_sources(sources, key=f"data.val_data.{name}")
        for name, sources in config.data.eval_sets.items()
    }
    check_apart(train_tasks, eval_sets, allow=config.data.allow_overlap)
    sampler: Sampler = (CurriculumSampler if trainer.curriculum else TaskSampler)(
        train_tasks,
        batch_size=trainer.train_batch_size,
        seed=trainer.seed,
        min_per_env=trainer.min_samples_per_env if trainer.use_hybrid_env_sampling else 0,
    )
    schedule = schedule_of(config, n_tasks=len(train_tasks))
    speaker = await assemble_speaker(config, train_tasks, open_env, policy_folder=policy_folder)
    demonstrations = (
        await demonstrate(
            _shown(train_tasks, trainer.warm_start.tasks, seed=trainer.seed),
            open_env,
            speaker.renderer,
            limits_of(config),
        )
        if trainer.warm_start.steps
        else []
    )
    # Before a tracker opens a file: a loss or a reference may be named wrongly.
    witness, losses = Witness(speaker.engine), LossWitness()
    learner = assemble_learner(
        config, speaker, checkpoints / "global_step_0" / "policy", watched=losses.watched
    )
    watch = assemble_watch(
        config,
        speaker,
        learner,
        envs={task.env_key for task in train_tasks},
        witness=witness,
        losses=losses,
    )
    sift, estimate = sift_of(config), estimate_of(config)
    trackers = make_trackers(
        ["console", "jsonl", *(n for n in trainer.logger if n not in ("console", "jsonl"))],
        run_folder=Path(trainer.run_path),
        run_name=trainer.run_name,
        project_name=trainer.project_name,
        config=flatten(config),
        resume_step=resume_step,
        total_steps=schedule.total_steps,
    )
    console = next(t for t in trackers if isinstance(t, ConsoleTracker))
    for key, why in still_metrics_of(config).items():
        console.note(f"{key} {why}")
    heard = replace(speaker, engine=witness)

    def policy(step: int) -> Policy:
        seed = trainer.seed * 1_000_003 + step
        return heard.policy(sampling_of(generator.sampling_params, seed=seed))

    return Run(
        folder=Path(trainer.run_path),
        checkpoints=checkpoints,
        seed=trainer.seed,
        schedule=schedule,
        state=TrainerState(),
        sampler=sampler,
        evals=assemble_evals(config, speaker, eval_sets, {task.env_key for task in train_tasks}),
        open_env=open_env,
        policy=policy,
        limits=limits_of(config),
        n_samples=generator.n_samples_per_prompt,
        max_concurrent=generator.max_num_seqs,
        sift=sift,
        estimate=estimate,
        mask_unfinished=generator.apply_overlong_filtering,
        learner=learner,
        engines=[speaker.engine],
        sync=InProcessSync(),
        watch=watch,
        log=StepLog(*trackers),
        console=console,
        demonstrations=demonstrations,
        warm_start_batch_size=trainer.warm_start.batch_size,
    )


def _shown(tasks: Sequence[Task], most: int, *, seed: int) -> Sequence[Task]:
    """The tasks a warm start may see; -1 is all of them."""
    return tasks if most < 0 or most >= len(tasks) else Random(seed).sample(list(tasks), most)
