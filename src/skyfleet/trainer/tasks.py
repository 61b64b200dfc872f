"""Which tasks a configuration trains on, and for how long; needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from skyfleet.config.root import RunConfig
from skyfleet.curation.allowed import check_allowed
from skyfleet.curation.quarantine import quarantine_for
from skyfleet.errors import ConfigError
from skyfleet.tasks.preparing import fingerprint
from skyfleet.tasks.task import Task
from skyfleet.trainer.schedule import Schedule
from skyfleet.trainer.sources import load_sources

logger = logging.getLogger(__name__)


def training_tasks(config: RunConfig) -> list[Task]:
    """What may be trained on. A held-out environment among them is refused, not dropped."""
    data = config.data
    tasks = load_sources(data.train_data, key="data.train_data")
    known = {task.env_key for task in tasks}
    if unknown := sorted(set(data.env_filter) - known):
        raise ConfigError(
            f"data.env_filter names {unknown[0]!r}, of which data.train_data has no task; "
            f"choose from {sorted(known)}"
        )
    tasks = [task for task in tasks if not data.env_filter or task.env_key in data.env_filter]
    held_out = sorted({t.env_key for t in tasks} & set(data.held_out_envs))
    if held_out:
        raise ConfigError(
            f"data.train_data holds tasks of {held_out[0]!r}, which data.held_out_envs keeps out "
            "of training; take it from one of the two"
        )
    check_allowed(
        tasks,
        data.train_data,
        allow_unmanifested=data.allow_unmanifested,
        quarantine=None
        if data.allow_quarantined
        else quarantine_for(data.train_data, data.quarantine),
    )
    return tasks


def check_apart(
    train_tasks: Sequence[Task], eval_sets: Mapping[str, Sequence[Task]], *, allow: bool
) -> None:
    """ConfigError for a task to evaluate on that is trained on, by its key or by what it asks."""
    if allow:
        return
    trained = {mark for task in train_tasks for mark in _marks(task)}
    for name, tasks in eval_sets.items():
        shared = [task.key for task in tasks if trained & _marks(task)]
        if shared:
            raise ConfigError(
                f"data.val_data.{name} holds {len(shared)} of its {len(tasks)} tasks, such as "
                f"{shared[0]!r}, in common with data.train_data; of a world take split=train and "
                "split=unseen_tasks, split a file with `skyfleet tasks prepare`, or set "
                "data.allow_overlap=true to overfit on purpose"
            )


def _marks(task: Task) -> set[str]:
    return {f"key {task.key}", fingerprint(task)}


def build_schedule(config: RunConfig, *, n_tasks: int) -> Schedule:
    trainer = config.trainer
    epoch = n_tasks // trainer.train_batch_size
    total = trainer.epochs * epoch
    if trainer.max_training_steps is not None:
        if trainer.max_training_steps > total:
            logger.warning(
                "trainer.max_training_steps=%d is never reached: trainer.epochs=%d end after %d "
                "steps; raise them",
                trainer.max_training_steps,
                trainer.epochs,
                total,
            )
        total = min(total, trainer.max_training_steps)
    return Schedule(
        total_steps=total,
        warm_start_steps=trainer.warm_start.steps,
        eval_before_train=trainer.eval_before_train,
        eval_interval=trainer.eval_interval,
        ckpt_interval=trainer.ckpt_interval,
        max_ckpts_to_keep=trainer.max_ckpts_to_keep,
        hf_save_interval=trainer.hf_save_interval,
        print_example_interval=trainer.print_example_interval,
        reference_interval=epoch if trainer.update_ref_every_epoch else -1,
    )
