"""What a resumed run must have in common with the process that started it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyfleet.checkpoints.checkpoint import Checkpoint
from skyfleet.envs.grading_code import GradingCode, describe_changes
from skyfleet.errors import ConfigError
from skyfleet.tasks.content_hash import hash_task_set
from skyfleet.tasks.task import Task

logger = logging.getLogger(__name__)


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


def check_code(saved: Mapping[str, Any], now: GradingCode | None) -> bool:
    """Whether other code than the saved one plays and grades from here on; warns if so.

    Resuming is allowed, because an error in an environment may be the reason to stop a run. Reports
    hold the code that graded them, and a comparison of two that differ has no verdict.
    """
    if not saved or now is None:
        return False
    before = GradingCode(**saved)
    if not before.is_comparable(now):
        logger.warning(
            "the run was started under %s and goes on under %s: whether the code that plays and "
            "grades has changed is not known",
            before.python,
            now.python,
        )
    elif changed := now.find_changes(before):
        logger.warning(
            "the code that plays and grades has changed since the run was started (%s): the run "
            "goes on with it, but evaluations before and after the change are not compared; for a "
            "verdict, train in a new folder: another trainer.run_name (run_dir=)",
            describe_changes(changed),
        )
        return True
    return False
