"""Save what a run has learnt when an interruption or an error ends it."""

from __future__ import annotations

import asyncio

from skyfleet.checkpoints.checkpoint import checkpoint_folder
from skyfleet.checkpoints.resume import find_checkpoint
from skyfleet.errors import (
    CheckpointError,
    DiskFullError,
    LearnerLostError,
    NoLearningSignalError,
    SentinelError,
)
from skyfleet.terminal import add_note
from skyfleet.trainer.run import Run


def save_progress(run: Run, error: BaseException, step: int) -> None:
    """Save a checkpoint at the last resume point; `error` ended `step`, which is repeated on resume.

    An error, such as one in a user's loss or callback, gets a note that names the checkpoint.
    """
    if isinstance(error, KeyboardInterrupt | CheckpointError):
        return  # a second Ctrl-C stops at once; a checkpoint that could not be saved is the error
    failed = _describe_position(run, step)
    run.rewind()
    if isinstance(error, SentinelError):
        _forget_rollouts(run, error)
    if isinstance(error, asyncio.CancelledError | NoLearningSignalError):
        run.save()
        return
    if isinstance(error, LearnerLostError):
        # The weights are gone with it, so the journal has all that was learnt since the checkpoint.
        add_note(error, f"{failed} failed: the same command: {_describe_resume(run)}")
        return
    try:
        outcome = _save_after_error(run, error)
    # A full disk, most often; the first error is the one to report.
    except Exception as failure:
        outcome = _describe_resume(run)
        if _find_disk_full(error) is None:
            outcome = f"{failure}; the same command: {outcome}"
    if full := _find_disk_full(error):
        full.safe = outcome
    else:
        add_note(error, f"{failed} failed: {outcome}")


def _forget_rollouts(run: Run, error: SentinelError) -> None:
    """The rollouts of the step are the error, or part of it: the next start must not use them."""
    try:
        run.journal.remove_after(run.state.step)
    except OSError as failure:
        add_note(error, f"{failure}; remove {run.journal.folder} before you run it again")


def _find_disk_full(error: BaseException) -> DiskFullError | None:
    """The error itself, or the first of a group: concurrent episodes meet it together."""
    if isinstance(error, BaseExceptionGroup):
        return _find_disk_full(error.exceptions[0])
    return error if isinstance(error, DiskFullError) else None


def _describe_position(run: Run, step: int) -> str:
    state = run.state
    if state.warm_start_step < run.schedule.warm_start_steps:
        return f"warm-start step {state.warm_start_step + 1}"
    if state.step < step:
        return f"training step {step}"
    if state.logged_step < step:
        return f"the evaluation or logging of step {step}"
    return f"saving or exporting step {step}"


def _save_after_error(run: Run, error: BaseException) -> str:
    """What the checkpoint holds, as a sentence."""
    step = run.state.step
    folder = checkpoint_folder(run.checkpoints, step)
    if run.is_within_update:
        if isinstance(error, SentinelError):
            return f"its update was not saved; the same command: {_describe_resume(run)}"
        if folder.exists():
            return f"its update was not complete; {folder.name} holds the steps before it"
        # These weights were trained on a part of its episodes: it is repeated with others.
        run.journal.remove_after(step)
        run.save()
        return (
            f"{folder} holds the steps before it and the part of its update that was complete; "
            "the same command repeats it"
        )
    run.save()
    return f"{folder} holds everything learnt before it; the same command goes on from there"


def _describe_resume(run: Run) -> str:
    newest = find_checkpoint(run.checkpoints, "latest")
    if newest is None:
        return "there is no checkpoint yet, so it starts over"
    return f"it resumes from {newest.folder}, which is intact"
