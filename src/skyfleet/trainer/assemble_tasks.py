"""The tasks of a run and the order they are drawn in, from configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyfleet.config.root import RunConfig
from skyfleet.tasks.curriculum import CurriculumSampler
from skyfleet.tasks.sampling import Sampler, TaskSampler
from skyfleet.tasks.task import Task
from skyfleet.trainer.schedule import Schedule
from skyfleet.trainer.sources import load_sources
from skyfleet.trainer.tasks import build_schedule, check_apart, training_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTasks:
    train: Sequence[Task]
    eval_sets: Mapping[str, Sequence[Task]]
    sampler: Sampler
    schedule: Schedule

    @property
    def trained_envs(self) -> frozenset[str]:
        return frozenset(task.env_key for task in self.train)


def assemble_tasks(config: RunConfig) -> RunTasks:
    trainer = config.trainer
    train = training_tasks(config)
    eval_sets = {
        name: load_sources(sources, key=f"data.val_data.{name}")
        for name, sources in config.data.eval_sets.items()
    }
    check_apart(train, eval_sets, allow=config.data.allow_overlap)
    sampler: Sampler = (CurriculumSampler if trainer.curriculum else TaskSampler)(
        train,
        batch_size=trainer.train_batch_size,
        seed=trainer.seed,
        min_per_env=trainer.min_samples_per_env if trainer.use_hybrid_env_sampling else 0,
    )
    return RunTasks(
        train=train,
        eval_sets=eval_sets,
        sampler=sampler,
        schedule=build_schedule(config, n_tasks=len(train)),
    )
