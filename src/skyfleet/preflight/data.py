"""Checks of the datasets: they load, have a manifest, hold no quarantined task, and are disjoint."""

from __future__ import annotations

from collections import Counter

from skyfleet.curation.quarantine import check_training_data, find_quarantine
from skyfleet.envs.registry import check_task_classes
from skyfleet.envs.verifiers.confinement import check_verifiers
from skyfleet.preflight.check import (
    CheckFailedError,
    NotCheckedError,
    Problems,
    Subject,
    check,
)
from skyfleet.tasks.sources import is_file
from skyfleet.tasks.task import Task
from skyfleet.trainer.tasks import build_sampler, check_disjoint, load_sources


def load_tasks_once(subject: Subject) -> list[Task]:
    """The training tasks for checks that only need them; the row "training tasks" reports an error."""
    try:
        return _load(subject)
    except Exception:
        raise NotCheckedError("data.train_data cannot be loaded; see the row above") from None


def _load(subject: Subject) -> list[Task]:
    data = subject.config.data

    def load() -> list[Task]:
        tasks = load_sources(data.train_data, key="data.train_data")
        return [task for task in tasks if not data.env_filter or task.env_key in data.env_filter]

    return subject.share("training tasks", load)


@check("training tasks", "data", timeout_seconds=300)
def check_training_tasks(subject: Subject) -> str:
    """They load, suffice for a batch, and name environments and verifiers that can run."""
    config = subject.config
    tasks = _load(subject)
    problems = Problems()
    problems.call(build_sampler, config, tasks)
    problems.call(check_task_classes, config, tasks)
    problems.call(check_verifiers, config, tasks)
    problems.call(_check_held_out, subject, tasks)
    problems.raise_all()
    by_env = Counter(task.env_key for task in tasks)
    return f"{len(tasks)}: " + ", ".join(f"{n} {env}" for env, n in sorted(by_env.items()))


def _check_held_out(subject: Subject, tasks: list[Task]) -> None:
    held_out = {task.env_key for task in tasks} & set(subject.config.data.held_out_envs)
    if held_out:
        raise CheckFailedError(
            f"data.train_data holds tasks of {min(held_out)!r}, which data.held_out_envs excludes "
            "from training; remove it from one of the two"
        )


@check("dataset manifest", "data", timeout_seconds=300)
def check_manifest(subject: Subject) -> str | None:
    """Every training file is listed in a manifest and unchanged."""
    data = subject.config.data
    files = [source for source in data.train_data if is_file(source)]
    if not files:
        return None
    tasks = load_tasks_once(subject)
    check_training_data(
        tasks, data.train_data, allow_unmanifested=data.allow_unmanifested, quarantine=None
    )
    allowed = " (data.allow_unmanifested=true)" if data.allow_unmanifested else ""
    return f"{len(files)} files{allowed}"


@check("quarantine", "data", timeout_seconds=300)
def check_quarantine(subject: Subject) -> str | None:
    """No training task failed its validation."""
    data = subject.config.data
    if data.allow_quarantined:
        return "not applied (data.allow_quarantined=true)"
    if data.quarantine is None and not any(map(is_file, data.train_data)):
        return None
    tasks = load_tasks_once(subject)
    quarantine = find_quarantine(data.train_data, data.quarantine)
    check_training_data(tasks, (), allow_unmanifested=True, quarantine=quarantine)
    files = ", ".join(quarantine.files) or "no quarantine.jsonl"
    return f"none of the training tasks ({files})"


@check("evaluation tasks", "data", timeout_seconds=300)
def check_evaluation_tasks(subject: Subject) -> str | None:
    """They load and have no task in common with training."""
    config, problems, counts = subject.config, Problems(), []
    for name, sources in config.data.eval_sets.items():
        tasks = problems.call(load_sources, sources, key=f"data.val_data.{name}")
        if tasks is None:
            continue
        counts.append(f"{name} {len(tasks)}")
        problems.call(check_task_classes, config, tasks)
        problems.call(check_verifiers, config, tasks)
        try:
            trained = load_tasks_once(subject)
        except NotCheckedError:
            continue
        problems.call(check_disjoint, trained, {name: tasks}, allow=config.data.allow_overlap)
    problems.raise_all()
    return ", ".join(counts) or None
