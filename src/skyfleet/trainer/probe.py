"""Probe: the first steps of a run in a folder of their own, to measure what the whole run will take.

A probe is a run: the same components, tasks, batches and policy, after the whole warm start. It
evaluates a sample of each set twice, because the first evaluation also measures the baselines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter

from skyfleet.analysis.run_costs import CHECKPOINT
from skyfleet.analysis.run_folder import RunFolder, open_run
from skyfleet.config.root import RunConfig
from skyfleet.config.trainer import Trainer
from skyfleet.storage.local import find_existing_folder
from skyfleet.tasks.task import Task
from skyfleet.trainer.tasks import Schedule, build_schedule, load_sources, load_training_tasks
from skyfleet.trainer.usage import reset_peak_memory

_EVAL_WAVES = 4
"""Episodes of the probe's evaluation, as a multiple of what the engine runs at once."""
_MIN_EVAL_TASKS = 8
_OUTPUT_KEYS = (
    *("logger", "hf_save_interval", "print_example_interval", "dump_data_batch"),
    *("dump_training_trajectories", "resume_mode", "resume_path", "ckpt_interval"),
    *("max_ckpts_to_keep", "ckpt_bucket", "trajectory_bucket", "wandb", "alerts", "prometheus"),
    "tracing",
)
"""Set to their defaults: a probe writes nothing outside its folder and tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a probe ran; its folder lasts as long as `open_probe`."""

    folder: RunFolder
    schedule: Schedule
    """Of the whole run."""
    startup_seconds: float
    """From the configuration to the first evaluation: loading, and the warm start."""
    last_checkpoint_seconds: float
    """Of the checkpoint after the last row. The first one takes longer."""
    eval_tasks: Mapping[str, int]
    """The tasks of each whole evaluation set."""
    probed_tasks: Mapping[str, int]
    """The tasks of each set that the probe evaluated."""


@asynccontextmanager
async def open_probe(
    config: RunConfig,
    *,
    n_steps: int,
    start: float,
    eval_episodes: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Probe]:
    """Train `n_steps` steps of the run, and remove them on exit.

    `start` is when the run's set-up began, by `perf_counter`. `eval_episodes` is the size of the
    sampled evaluation; 0 is four times what runs at once.
    """
    reset_peak_memory()
    train_tasks = load_training_tasks(config)
    schedule = build_schedule(config, n_tasks=len(train_tasks))
    eval_sets = _load_eval_sets(config, schedule)
    sampled = _sample_sets(config, eval_sets, eval_episodes)
    # Beside the run's checkpoints, whose disk decides how long a checkpoint takes.
    root = find_existing_folder(Path(config.trainer.ckpt_path))
    with TemporaryDirectory(prefix=".plan-", dir=root, ignore_cleanup_errors=True) as folder:
        probe_config = configure_probe(config, Path(folder), min(n_steps, schedule.total_steps))
        startup, saving = await _train(probe_config, train_tasks, sampled, start, on_progress)
        yield Probe(
            folder=open_run(Path(folder)),
            schedule=schedule,
            startup_seconds=startup,
            last_checkpoint_seconds=saving,
            eval_tasks={name: len(tasks) for name, tasks in eval_sets.items()},
            probed_tasks={name: len(tasks) for name, tasks in sampled.items()},
        )


def count_evaluations(schedule: Schedule) -> int:
    return sum(map(schedule.evaluates_at, range(schedule.total_steps + 1)))


def count_checkpoints(schedule: Schedule) -> int:
    """Those of step 0 too."""
    return 1 + sum(map(schedule.saves_at, range(1, schedule.total_steps + 1)))


async def _train(
    config: RunConfig,
    train_tasks: Sequence[Task],
    eval_sets: Mapping[str, Sequence[Task]],
    start: float,
    on_progress: Callable[[str], None],
) -> tuple[float, float]:
    """Run the probe; returns the seconds before its first evaluation, and of its last checkpoint."""
    from skyfleet.trainer.assemble import GivenObjects
    from skyfleet.trainer.loops import train
    from skyfleet.trainer.sft import warm_start
    from skyfleet.trainer.training_run import open_training_run

    given = GivenObjects(train_tasks=train_tasks, eval_sets=eval_sets)
    async with open_training_run(config, given=given, on_progress=on_progress) as run:
        await warm_start(run)
        seconds = perf_counter() - start
        await train(run)
        return seconds, run.log.pending[CHECKPOINT]


def configure_probe(config: RunConfig, folder: Path, n_steps: int) -> RunConfig:
    """The first steps of a run in a folder of their own."""
    trainer = config.trainer
    defaults = {
        name: Trainer.model_fields[name].get_default()
        for name in _OUTPUT_KEYS
        if name in Trainer.model_fields
    }
    changes = {
        **defaults,
        "run_path": str(folder),
        "ckpt_path": str(folder / "checkpoints"),
        "export_path": str(folder / "exports"),
        "resume_mode": "none",
        "max_training_steps": n_steps,
        "ckpt_interval": -1,
        "eval_interval": n_steps,
        "eval_before_train": True,
    }
    return config.model_copy(update={"trainer": trainer.model_copy(update=changes)})


def _load_eval_sets(config: RunConfig, schedule: Schedule) -> dict[str, list[Task]]:
    """None if the run never evaluates."""
    if not count_evaluations(schedule):
        return {}
    return {
        name: load_sources(sources, key=f"data.val_data.{name}")
        for name, sources in config.data.eval_sets.items()
    }


def _sample_sets(
    config: RunConfig, sets: Mapping[str, Sequence[Task]], n_episodes: int
) -> dict[str, list[Task]]:
    """The same share of every set, at least a few tasks of each."""
    generator, total = config.generator, sum(map(len, sets.values()))
    if not total:
        return {}
    wanted = (
        n_episodes or _EVAL_WAVES * generator.max_num_seqs
    ) / generator.eval_n_samples_per_prompt
    share, random = min(1.0, wanted / total), Random(config.trainer.seed)
    return {
        name: random.sample(
            list(tasks), min(len(tasks), max(_MIN_EVAL_TASKS, round(share * len(tasks))))
        )
        for name, tasks in sets.items()
    }
