"""Assemble: the one door through which configuration becomes objects."""

from __future__ import annotations

from pathlib import Path

from skyfleet.config.explain import flatten
from skyfleet.config.root import RunConfig
from skyfleet.config.rules import unsupported
from skyfleet.envs.registry import env_factory
from skyfleet.errors import ConfigError
from skyfleet.rollouts.conversation import Policy
from skyfleet.tasks.sampling import TaskSampler
from skyfleet.tasks.task import Task
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.step_log import StepLog
from skyfleet.tracking.tracker import make_trackers
from skyfleet.trainer.assemble_learner import assemble_learner, estimate_of, sift_of
from skyfleet.trainer.assemble_policy import assemble_speaker, limits_of, sampling_of
from skyfleet.trainer.demonstrations import demonstrate
from skyfleet.trainer.run import Run, Schedule
from skyfleet.trainer.sources import load_sources
from skyfleet.trainer.state import TrainerState
from skyfleet.weight_sync.sync import InProcessSync


async def assemble(config: RunConfig, *, resume_step: int | None) -> Run:
    """`resume_step` is the last step whose metrics count; None starts afresh."""
    if gaps := unsupported(config):
        raise ConfigError("\n".join(gaps))
    trainer, generator = config.trainer, config.generator
    folder = Path(trainer.run_path).expanduser()
    checkpoints = Path(trainer.ckpt_path).expanduser()
    train_tasks = training_tasks(config)
    open_env = env_factory(config.environment.env_class)
    sampler = TaskSampler(
        train_tasks,
        batch_size=trainer.train_batch_size,
        seed=trainer.seed,
        min_per_env=trainer.min_samples_per_env if trainer.use_hybrid_env_sampling else 0,
    )
    schedule = schedule_of(config, n_tasks=len(train_tasks))
    speaker = await assemble_speaker(config, train_tasks, open_env)
    demonstrations = (
        await demonstrate(
            train_tasks[: trainer.warm_start.tasks]
            if trainer.warm_start.tasks > 0
            else train_tasks,
            open_env,
            speaker.renderer,
            limits_of(config),
        )
        if trainer.warm_start.steps
        else []
    )
    trackers = make_trackers(
        ["console", "jsonl", *(n for n in trainer.logger if n not in ("console", "jsonl"))],
        run_folder=folder,
        run_name=trainer.run_name,
        project_name=trainer.project_name,
        config=flatten(config),
        resume_step=resume_step,
        total_steps=schedule.total_steps,
    )
    console = next(t for t in trackers if isinstance(t, ConsoleTracker))

    def policy(step: int) -> Policy:
        seed = trainer.seed * 1_000_003 + step
        return speaker.policy(sampling_of(generator.sampling_params, seed=seed))

    return Run(
        folder=folder,
        checkpoints=checkpoints,
        schedule=schedule,
        state=TrainerState(),
        sampler=sampler,
        eval_sets={
            name: load_sources(sources, key=f"data.val_data.{name}")
            for name, sources in config.data.eval_sets.items()
        },
        open_env=open_env,
        policy=policy,
        eval_policy=speaker.policy(sampling_of(generator.eval_sampling_params, seed=trainer.seed)),
        limits=limits_of(config),
        n_samples=generator.n_samples_per_prompt,
        eval_n_samples=generator.eval_n_samples_per_prompt,
        max_concurrent=generator.max_num_seqs,
        sift=sift_of(config),
        estimate=estimate_of(config),
        mask_unfinished=generator.apply_overlong_filtering,
        learner=assemble_learner(config, speaker, checkpoints / "global_step_0" / "policy"),
        engines=[speaker.engine],
        sync=InProcessSync(),
        log=StepLog(*trackers),
        console=console,
        demonstrations=demonstrations,
        warm_start_batch_size=trainer.warm_start.batch_size,
    )


def training_tasks(config: RunConfig) -> list[Task]:
    """What may be trained on. A held-out environment among them is refused, not dropped."""
    tasks = load_sources(config.data.train_data, key="data.train_data")
    held_out = sorted({t.env_key for t in tasks} & set(config.data.held_out_envs))
    if held_out:
        raise ConfigError(
            f"data.train_data holds tasks of {held_out[0]!r}, which data.held_out_envs keeps out "
            "of training; take it from one of the two"
        )
    return tasks


def schedule_of(config: RunConfig, *, n_tasks: int) -> Schedule:
    trainer = config.trainer
    total = trainer.epochs * (n_tasks // trainer.train_batch_size)
    if trainer.max_training_steps is not None:
        total = min(total, trainer.max_training_steps)
    return Schedule(
        total_steps=total,
        warm_start_steps=trainer.warm_start.steps,
        eval_before_train=trainer.eval_before_train,
        eval_interval=trainer.eval_interval,
        ckpt_interval=trainer.ckpt_interval,
        max_ckpts_to_keep=trainer.max_ckpts_to_keep,
    )
