"""What a resumed run must have in common with the process that started it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from skyfleet.checkpoints.checkpoint import Checkpoint
from skyfleet.errors import ConfigError
from skyfleet.tasks.content_hash import hash_task_set
from skyfleet.tasks.task import Task


def is_own_checkpoint(checkpoint: Checkpoint | None, checkpoints: Path) -> bool:
    """Whether a run resumes; else it begins, perhaps from a checkpoint of another run."""
    return checkpoint is not None and (checkpoint.folder.resolve().parent == checkpoints.resolve())


def hash_eval_sets(
    saved: Mapping[str, str], eval_sets: Mapping[str, Sequence[Task]]
) -> dict[str, str]:
    """The hash of each evaluation set by name, those of `saved` included.

    ConfigError if a set has other tasks than the saved one: a comparison would mix the two.
    """
    hashes = {name: hash_task_set(tasks) for name, tasks in eval_sets.items()}
    for name, value in hashes.items():
        if saved.get(name, value) != value:
            raise ConfigError(
                f"data.val_data.{name} (eval= in Python) has other tasks than the run was started "
                "with: tasks were edited, added or removed; resume with the same tasks, or train "
                "in a new folder: another trainer.run_name (run_dir=)"
            )
    return {**saved, **hashes}
