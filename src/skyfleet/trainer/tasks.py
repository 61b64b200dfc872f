"""The tasks of a run: which are trained on, which are evaluated, in which order, and when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from skyfleet.chat.message import Message, Role
from skyfleet.chat.renderer import Renderer
from skyfleet.config.root import RunConfig
from skyfleet.curation.quarantine import check_training_data, find_quarantine
from skyfleet.errors import ConfigError
from skyfleet.tasks.curriculum import CurriculumSampler
from skyfleet.tasks.loading import drop_long_prompts as drop_long
from skyfleet.tasks.loading import load_tasks
from skyfleet.tasks.mixture import MixtureSampler
from skyfleet.tasks.prepare import fingerprint
from skyfleet.tasks.sampling import Sampler, TaskSampler
from skyfleet.tasks.splits import select_subset
from skyfleet.tasks.task import Task, TaskSet
from skyfleet.worlds.catalog import tasks_from_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a run evaluates, saves and exports; all numbers are steps."""

    total_steps: int
    warm_start_steps: int = 0
    eval_before_train: bool = True
    eval_interval: int = -1
    ckpt_interval: int = -1
    max_ckpts_to_keep: int = -1
    hf_save_interval: int = -1
    print_example_interval: int = -1
    reference_interval: int = -1
    """The KL reference is renewed after this many steps; -1 never renews it."""

    def evaluates_at(self, step: int) -> bool:
        """Step 0 is before training. With an interval, the last step is evaluated too."""
        if step == 0:
            return self.eval_before_train
        return self.eval_interval > 0 and self._due(step, self.eval_interval)

    def saves_at(self, step: int) -> bool:
        return self._due(step, self.ckpt_interval)

    def exports_at(self, step: int) -> bool:
        """With an interval, the last step is exported too."""
        return step > 0 and self.hf_save_interval > 0 and self._due(step, self.hf_save_interval)

    def prints_example_at(self, step: int) -> bool:
        return self.print_example_interval > 0 and step % self.print_example_interval == 0

    def renews_reference_at(self, step: int) -> bool:
        """Never after the last step, which no update follows."""
        within = 0 < step < self.total_steps and self.reference_interval > 0
        return within and step % self.reference_interval == 0

    def _due(self, step: int, interval: int) -> bool:
        return step == self.total_steps or (interval > 0 and step % interval == 0)


def load_sources(sources: Sequence[str], *, key: str) -> list[Task]:
    """The tasks of all sources, in order."""
    tasks = [task for source in sources for task in _load(source)]
    if not tasks:
        raise ConfigError(
            f"{key} is empty: name task files or worlds, such as world:github?split=train&count=400"
        )
    return list(TaskSet(tasks))


def _load(source: str) -> list[Task]:
    """A file, `world:github?split=train&count=400`, `agentdojo:slack` (`agentdojo:` is all),
    `tau_bench:retail?split=test`, `tau2:airline?split=base` or `bfcl:simple_python?count=100`."""
    if source.startswith("world:"):
        return tasks_from_source(source)
    if source.startswith("agentdojo:"):
        from skyfleet.envs.agentdojo.tasks import agentdojo_tasks

        return agentdojo_tasks(source.removeprefix("agentdojo:") or None)
    if source.startswith(("tau_bench:", "tau2:")):
        from skyfleet.envs.tau.sources import tau_tasks_from_source

        return tau_tasks_from_source(source)
    if source.startswith("bfcl:"):
        from skyfleet.envs.bfcl.tasks import bfcl_tasks_from_source

        return bfcl_tasks_from_source(source)
    return load_tasks(source)


logger = logging.getLogger(__name__)


def load_training_tasks(config: RunConfig) -> list[Task]:
    """The tasks to train on. A held-out environment among them is an error, not dropped."""
    data = config.data
    tasks = load_sources(data.train_data, key="data.train_data")
    known = {task.env_key for task in tasks}
    if unknown := sorted(set(data.env_filter) - known):
        raise ConfigError(
            f"data.env_filter={unknown[0]!r}: data.train_data has no task of this environment; "
            f"choose from {sorted(known)}"
        )
    tasks = [task for task in tasks if not data.env_filter or task.env_key in data.env_filter]
    held_out = sorted({t.env_key for t in tasks} & set(data.held_out_envs))
    if held_out:
        raise ConfigError(
            f"data.train_data holds tasks of {held_out[0]!r}, which data.held_out_envs excludes "
            "from training; remove it from one of the two"
        )
    check_training_data(
        tasks,
        data.train_data,
        allow_unmanifested=data.allow_unmanifested,
        quarantine=None
        if data.allow_quarantined
        else find_quarantine(data.train_data, data.quarantine),
    )
    return _limit_tasks(config, tasks)


def _limit_tasks(config: RunConfig, tasks: list[Task]) -> list[Task]:
    limit = config.data.max_train_tasks
    if limit is None or limit >= len(tasks):
        return tasks
    return select_subset(tasks, limit, seed=config.trainer.seed)


def check_disjoint(
    train_tasks: Sequence[Task], eval_sets: Mapping[str, Sequence[Task]], *, allow: bool
) -> None:
    """Raise ConfigError if an evaluation task, by key or by content, is also trained on."""
    if allow:
        return
    trained = {identity for task in train_tasks for identity in _identities(task)}
    for name, tasks in eval_sets.items():
        shared = [task.key for task in tasks if trained & _identities(task)]
        if shared:
            raise ConfigError(
                f"data.val_data.{name} holds {len(shared)} of its {len(tasks)} tasks, such as "
                f"{shared[0]!r}, in common with data.train_data; for a world use split=train and "
                "split=unseen_tasks, split a file with `skyfleet tasks prepare`, or set "
                "data.allow_overlap=true to overfit on purpose"
            )


def _identities(task: Task) -> set[str]:
    return {f"key {task.key}", fingerprint(task)}


def build_schedule(config: RunConfig, *, n_tasks: int) -> Schedule:
    trainer = config.trainer
    epoch = n_tasks // trainer.train_batch_size
    total = trainer.epochs * epoch
    if trainer.max_training_steps is not None:
        if trainer.max_training_steps > total:
            logger.warning(
                "trainer.max_training_steps=%d is not reached: trainer.epochs=%d is only %d "
                "steps; raise trainer.epochs",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTasks:
    train: Sequence[Task]
    eval_sets: Mapping[str, Sequence[Task]]
    sampler: Sampler
    schedule: Schedule

    @property
    def trained_envs(self) -> frozenset[str]:
        return frozenset(task.env_key for task in self.train)

    @property
    def all(self) -> list[Task]:
        return [*self.train, *(task for tasks in self.eval_sets.values() for task in tasks)]


def load_run_tasks(
    config: RunConfig,
    *,
    train_tasks: Sequence[Task] | None = None,
    eval_sets: Mapping[str, Sequence[Task]] | None = None,
) -> RunTasks:
    """The configured tasks; those given as objects replace the configured ones."""
    if train_tasks is None:
        train = load_training_tasks(config)
    else:
        train = _limit_tasks(config, list(TaskSet(train_tasks)))
    if eval_sets is None:
        eval_sets = {
            name: load_sources(sources, key=f"data.val_data.{name}")
            for name, sources in config.data.eval_sets.items()
        }
    check_disjoint(train, eval_sets, allow=config.data.allow_overlap)
    return _build_run_tasks(config, train, eval_sets)


def drop_long_prompts(config: RunConfig, tasks: RunTasks, renderer: Renderer) -> RunTasks:
    """The tasks whose prompt has at most `trainer.max_prompt_length` tokens; logs the others' count."""
    limit = config.trainer.max_prompt_length
    if limit is None:
        return tasks

    def count_tokens(task: Task) -> int:
        return len(renderer.render_prompt([_to_message(message) for message in task.chat], ()))

    train, n_dropped = drop_long(tasks.train, count_tokens, limit)
    eval_sets: dict[str, Sequence[Task]] = {}
    for name, eval_tasks in tasks.eval_sets.items():
        eval_sets[name], n_eval_dropped = drop_long(eval_tasks, count_tokens, limit)
        n_dropped += n_eval_dropped
    if not n_dropped:
        return tasks
    logger.warning(
        "dropped %d of %d tasks: their prompts are longer than trainer.max_prompt_length=%d tokens",
        n_dropped,
        len(tasks.all),
        limit,
    )
    if not train:
        raise ConfigError(
            f"trainer.max_prompt_length={limit} drops every task of data.train_data; raise it"
        )
    return _build_run_tasks(config, train, eval_sets)


def _to_message(message: Mapping[str, str]) -> Message:
    role = "system" if message["role"] == "developer" else message["role"]
    return Message(role=cast("Role", role), content=message["content"])


def _build_run_tasks(
    config: RunConfig, train: Sequence[Task], eval_sets: Mapping[str, Sequence[Task]]
) -> RunTasks:
    return RunTasks(
        train=train,
        eval_sets=eval_sets,
        sampler=build_sampler(config, train),
        schedule=build_schedule(config, n_tasks=len(train)),
    )


def build_sampler(config: RunConfig, tasks: Sequence[Task]) -> Sampler:
    """Raise ConfigError if the tasks do not fill a batch, or not with the configured weights."""
    trainer, weights = config.trainer, config.data.env_weights
    build: Callable[..., Sampler] = TaskSampler
    if trainer.curriculum:
        build = partial(CurriculumSampler, weights=weights)
    elif weights:
        build = partial(MixtureSampler, weights=weights)
    return build(
        tasks,
        batch_size=trainer.train_batch_size,
        seed=trainer.seed,
        min_per_env=trainer.min_samples_per_env if trainer.use_hybrid_env_sampling else 0,
    )
