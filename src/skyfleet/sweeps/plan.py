"""SweepPlan: the runs of a sweep, checked as far as possible before the first one starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from skyfleet.config.loading import load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.curation.quarantine import find_data_version, is_file
from skyfleet.errors import ConfigError
from skyfleet.storage.store import is_remote
from skyfleet.sweeps.grid import SIZE_KEY, Grid, Variant
from skyfleet.tasks.sampling import check_batch_size
from skyfleet.tasks.splits import select_subset
from skyfleet.tasks.task import Task
from skyfleet.trainer.tasks import build_schedule, load_sources, load_training_tasks

RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    name: str
    variant: Variant
    seed: int
    overrides: tuple[str, ...]
    """Everything but the run's name and folder, which differ on another machine."""
    folder: Path
    config: RunConfig
    n_tasks: int | None
    """Training tasks; None if the data is on another machine and no size is given."""
    total_steps: int | None

    @property
    def local_overrides(self) -> list[str]:
        return [*self.overrides, *_local_overrides(self.name, self.folder)]

    @property
    def training_episodes(self) -> int | None:
        trainer, generator = self.config.trainer, self.config.generator
        if self.total_steps is None:
            return None
        return self.total_steps * trainer.train_batch_size * generator.n_samples_per_prompt

    def count_evaluation_episodes(self, n_eval_tasks: int) -> int | None:
        if self.total_steps is None or self.n_tasks is None:
            return None
        schedule = build_schedule(self.config, n_tasks=self.n_tasks)
        n_evaluations = sum(map(schedule.evaluates_at, range(schedule.total_steps + 1)))
        return n_evaluations * n_eval_tasks * self.config.generator.eval_n_samples_per_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    name: str
    folder: Path
    config_name: str
    grid: Grid
    runs: tuple[SweepRun, ...]
    """Seed by seed, so that the first comparison is possible after one run of each variant."""

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    @property
    def data_versions(self) -> dict[str, str]:
        """Of the training files that have a manifest."""
        sources = dict.fromkeys(
            source for run in self.runs for source in run.config.data.train_data
        )
        found = {source: find_data_version(source) for source in sources if not _is_absent(source)}
        return {source: version for source, version in found.items() if version}

    def count_eval_tasks(self) -> int:
        """Tasks of all evaluation sets of the first run; 0 if they are on another machine."""
        sets = self.runs[0].config.data.eval_sets
        if any(_is_absent(source) for sources in sets.values() for source in sources):
            return 0
        return sum(len(load_sources(s, key=f"data.val_data.{name}")) for name, s in sets.items())


def plan_sweep(
    config_name: str, grid: Grid, *, name: str = "", allow_absent_data: bool = False
) -> SweepPlan:
    """Load the configuration of every run and check its data; raise ConfigError for the first problem.

    With `allow_absent_data` training files may be missing here, because they are on another machine.
    """
    base = load_config_file(config_name, grid.overrides)
    name = _check_name(name or _name_sweep(config_name, grid))
    folder = RUNS / name
    tasks = _TaskCache(allow_absent=allow_absent_data)
    runs = [
        _plan_run(config_name, grid, variant, base.trainer.seed + number, name, folder, tasks)
        for number in range(grid.n_seeds)
        for variant in grid.variants
    ]
    _check_checkpoint_folders(runs)
    return SweepPlan(name=name, folder=folder, config_name=config_name, grid=grid, runs=tuple(runs))


def _name_sweep(config_name: str, grid: Grid) -> str:
    """`tiny-lr` for the sweep of a learning rate."""
    keys = [grid.shorten_key(axis.key) for axis in grid.axes]
    keys += ["data"] if grid.data_sizes else []
    parts = [Path(config_name).stem, *(keys or ["seeds"])]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(parts))


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?", name):
        raise ConfigError(
            f"--name {name!r}: start with a letter, end with a letter or a digit, and use only "
            "letters, digits, _, . and -"
        )
    return name


def _plan_run(
    config_name: str,
    grid: Grid,
    variant: Variant,
    seed: int,
    sweep: str,
    sweep_folder: Path,
    tasks: _TaskCache,
) -> SweepRun:
    slug = grid.slug(variant)
    if len(grid.axes) == 1 and sweep.endswith(f"-{(key := grid.shorten_key(grid.axes[0].key))}"):
        slug = slug.removeprefix(f"{key}-")  # the sweep's name ends with it
    name = "-".join(filter(None, [sweep, slug, f"seed{seed}"]))
    folder = sweep_folder / name
    local = _local_overrides(name, folder)
    overrides = [*grid.overrides, *variant.overrides, f"trainer.seed={seed}"]
    config = load_config_file(config_name, [*overrides, *local])
    _check_evaluations(config)
    n_tasks = tasks.count(config)
    if added := _list_sweep_settings(config, variant, n_tasks):
        overrides += added
        config = load_config_file(config_name, [*overrides, *local])
    steps = config.trainer.max_training_steps
    if n_tasks is not None:
        steps = build_schedule(config, n_tasks=n_tasks).total_steps
    return SweepRun(
        name=name,
        variant=variant,
        seed=seed,
        overrides=tuple(overrides),
        folder=folder,
        config=config,
        n_tasks=n_tasks,
        total_steps=steps,
    )


def _list_sweep_settings(config: RunConfig, variant: Variant, n_tasks: int | None) -> list[str]:
    """What a sweep sets in addition to the values that are swept."""
    trainer, settings = config.trainer, []
    if trainer.resume_mode == "none":
        settings.append("trainer.resume_mode=latest")
    if variant.data_size is not None and n_tasks is not None and trainer.max_training_steps:
        # Every size trains as long as the others, on fewer tasks more often.
        needed = ceil(trainer.max_training_steps / max(1, n_tasks // trainer.train_batch_size))
        if needed > trainer.epochs:
            settings.append(f"trainer.epochs={needed}")
    return settings


def _local_overrides(name: str, folder: Path) -> list[str]:
    return [f"trainer.run_name={name}", f"trainer.run_path={folder.as_posix()}"]


def _check_evaluations(config: RunConfig) -> None:
    if not config.data.eval_sets:
        raise ConfigError(
            "data.val_data is empty, so the runs of the sweep could not be compared; name "
            "evaluation tasks, such as world:github?split=unseen_tasks&count=120"
        )
    if config.trainer.eval_interval < 1:
        raise ConfigError(
            f"trainer.eval_interval={config.trainer.eval_interval} evaluates no run at its end, where "
            "a sweep compares them; set the number of steps between evaluations"
        )


def _check_checkpoint_folders(runs: Sequence[SweepRun]) -> None:
    """No two runs share checkpoints."""
    owners: dict[str, str] = {}
    for run in runs:
        path = run.config.trainer.ckpt_path
        if owners.setdefault(path, run.name) != run.name:
            raise ConfigError(
                f"trainer.ckpt_path={path!r} is the same for {owners[path]} and {run.name}; remove it, "
                "or write ${trainer.run_path}/checkpoints"
            )


class _TaskCache:
    """The training tasks of runs; those of equal sources are loaded once."""

    def __init__(self, *, allow_absent: bool) -> None:
        self._allow_absent = allow_absent
        self._loaded: dict[str, list[Task]] = {}

    def count(self, config: RunConfig) -> int | None:
        """The tasks that a run trains on; None if a file is not on this machine and no size is set."""
        data = config.data.model_copy(update={"max_train_tasks": None})
        if self._allow_absent and any(map(_is_absent, data.train_data)):
            return config.data.max_train_tasks
        key = data.model_dump_json()
        if key not in self._loaded:
            self._loaded[key] = load_training_tasks(config.model_copy(update={"data": data}))
        tasks, size, trainer = self._loaded[key], config.data.max_train_tasks, config.trainer
        if size is not None:
            if size > len(tasks):
                raise ConfigError(
                    f"data size {size} ({SIZE_KEY}): data.train_data has only {len(tasks)} tasks; "
                    f"use at most {len(tasks)}"
                )
            tasks = select_subset(tasks, size, seed=trainer.seed)
        min_per_env = trainer.min_samples_per_env if trainer.use_hybrid_env_sampling else 0
        check_batch_size(tasks, trainer.train_batch_size, min_per_env)
        return len(tasks)


def _is_absent(source: str) -> bool:
    return is_file(source) and not is_remote(source) and not Path(source).is_file()
