"""How a run starts: hold its folder, clean up after a killed process, find where to resume."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from skyfleet.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyfleet.checkpoints.resume import (
    ResumeMode,
    find_checkpoint,
    find_verified_checkpoint,
    verify_checkpoint,
)
from skyfleet.checkpoints.saving import sweep_checkpoints
from skyfleet.config.keys import diff
from skyfleet.config.loading import load_recorded_config
from skyfleet.config.redaction import differs_in_secrets_only
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import remove_reports_after
from skyfleet.storage.folder_lock import FolderLock, check_not_in_use, lock_folders
from skyfleet.storage.local import sweep
from skyfleet.storage.step_rows import read_last_step
from skyfleet.trainer.exports import sweep_exports
from skyfleet.trajectories.archive import remove_episodes_after

CONFIG, METRICS = "config.yaml", "metrics.jsonl"

# Keys that may change when a run is resumed: duration, intervals, outputs, servers; memory, where it
# changes results by rounding at most; and where an environment runs.
KEYS_MUTABLE_ON_RESUME = (
    "trainer.epochs",
    "trainer.max_training_steps",
    "trainer.algorithm.dynamic_sampling.max_sample_batches",
    "trainer.eval_interval",
    "trainer.ckpt_interval",
    "trainer.max_ckpts_to_keep",
    "trainer.hf_save_interval",
    "trainer.print_example_interval",
    "trainer.dump_data_batch",
    "trainer.dump_training_trajectories",
    "trainer.resume_mode",
    "trainer.resume_path",
    "trainer.resume_strict",
    "trainer.logger",
    "trainer.wandb.modality",
    "trainer.wandb.entity",
    "trainer.wandb.project",
    "trainer.alerts.slack_channel",
    "trainer.alerts.webhook_url",
    "trainer.alerts.dollars_per_hour",
    "trainer.prometheus.port",
    "trainer.prometheus.host",
    "trainer.prometheus.allowed_hosts",
    "trainer.tracing",
    "generator.remote_inference_engine_urls",
    "generator.weight_sync_dir",
    "generator.probe_timeout_seconds",
    "trainer.sentinels.mode",
    "trainer.sentinels.modes",
    "trainer.gradient_checkpointing",
    "trainer.loss_chunk_size",
    "trainer.max_tokens_per_microbatch",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.policy.optimizer_config.offload_after_step",
    "trainer.critic.optimizer_config.offload_after_step",
    "trainer.ref.fsdp_config.cpu_offload",
    "generator.max_num_seqs",
    "generator.max_num_batched_tokens",
    "generator.gpu_memory_utilization",
    "generator.enforce_eager",
    "environment.isolation",
    "environment.worker_memory_gb",
    "environment.close_timeout_seconds",
    "environment.verifier.allow_unconfined",
    "environment.skyrl_gym.max_env_workers",
)


def hold_run_folders(
    config: RunConfig, on_progress: Callable[[str], None]
) -> AbstractAsyncContextManager[list[FolderLock]]:
    """Lock the run folder and the checkpoint folder, which another run may name, too."""
    return lock_folders(_list_locked_folders(config), on_progress)


def check_startable(config: RunConfig) -> Checkpoint | None:
    """What a run would resume from, or its error; for a dry run, which holds and changes nothing."""
    for folder in _list_locked_folders(config):
        check_not_in_use(folder)
    return find_resume_checkpoint(config)


def _list_locked_folders(config: RunConfig) -> list[Path]:
    run, checkpoints = Path(config.trainer.run_path), Path(config.trainer.ckpt_path)
    return [run] if checkpoints.resolve() == run.resolve() else [run, checkpoints]


def prepare_folders(config: RunConfig) -> Checkpoint | None:
    """Remove what a killed process left half-written, and find the checkpoint to resume from.

    The folders must be locked. Those of another run raise ConfigError and stay unchanged.
    """
    run, exports = Path(config.trainer.run_path), Path(config.trainer.export_path)
    reject_other_run(config)
    sweep_checkpoints(Path(config.trainer.ckpt_path))
    sweep(run)
    for reports in run.glob("reports/step_*"):
        sweep(reports)
    # Several runs may share a folder of exports elsewhere, and only this run's folder is locked.
    if exports.resolve().is_relative_to(run.resolve()):
        sweep_exports(exports)
    return find_resume_checkpoint(config)


def find_resume_checkpoint(config: RunConfig) -> Checkpoint | None:
    """Decide from which checkpoint the run resumes, its files verified; None to start. Writes nothing.

    Raises ConfigError if the run directory belongs to another run.
    """
    reject_other_run(config)
    if config.trainer.resume_mode == "from_path":
        return _find_checkpoint_from_path(config)
    found = _find_own_checkpoint(config)
    if found is None:
        _reject_rows_without_checkpoint(config)
    return found


def describe_start(config: RunConfig, checkpoint: Checkpoint | None) -> str | None:
    """Where a run resumes, or that it starts over; None for a new run."""
    trainer = config.trainer
    if checkpoint:
        return f"resuming {trainer.run_name} at step {checkpoint.step} from {checkpoint.folder}"
    if read_last_step(Path(trainer.run_path) / METRICS) is not None:
        return (
            f"{trainer.run_path} was stopped before its first checkpoint: the run starts over and "
            "replaces the row of step 0"
        )
    return None


def discard_replayed_steps(folder: Path, last_step: int) -> None:
    """Remove the episodes and reports of steps after `last_step`, which are run again."""
    remove_episodes_after(folder / "trajectories", last_step)
    remove_reports_after(folder, last_step)


def _find_own_checkpoint(config: RunConfig) -> Checkpoint | None:
    trainer = config.trainer
    mode: ResumeMode = "none" if trainer.resume_mode == "none" else "latest"
    return find_verified_checkpoint(Path(trainer.ckpt_path), mode, strict=trainer.resume_strict)


def _find_checkpoint_from_path(config: RunConfig) -> Checkpoint:
    """`trainer.resume_path`, or what this command has saved since it first resumed from there.

    Later checkpoints of another command raise ConfigError: the next `resume_mode=latest` would resume
    from them.
    """
    trainer = config.trainer
    assert trainer.resume_path is not None, "the configuration was validated"
    given = read_checkpoint(Path(trainer.resume_path))
    newest = find_checkpoint(Path(trainer.ckpt_path), "latest")
    if newest is not None and newest.step > given.step:
        if not _repeats_resume_path(config):
            raise ConfigError(
                f"trainer.resume_path={trainer.resume_path!r} is step {given.step} and "
                f"{newest.folder} is later; move it away, or give trainer.run_name another name"
            )
        own = _find_own_checkpoint(config)
        if own is not None and own.step > given.step:
            return own
    return verify_checkpoint(given)


def _repeats_resume_path(config: RunConfig) -> bool:
    """Whether the run folder was last started from the same checkpoint."""
    path = Path(config.trainer.run_path) / CONFIG
    if not path.exists():
        return False
    changed = diff(load_recorded_config(path), config)
    return not changed.keys() & {"trainer.resume_mode", "trainer.resume_path"}


def reject_other_run(config: RunConfig) -> None:
    """One directory holds one run."""
    trainer, folder = config.trainer, Path(config.trainer.run_path)
    has_rows = read_last_step(folder / METRICS) is not None
    if trainer.resume_mode == "none":
        if has_rows:
            raise ConfigError(
                f"{folder} already holds a run; give trainer.run_name another name, "
                "move the folder away, or resume it with trainer.resume_mode=latest"
            )
        return
    path = folder / CONFIG
    checkpoints = Path(trainer.ckpt_path)
    has_checkpoint = trainer.resume_mode == "from_path" or any(
        (*checkpoints.glob("global_step_*"), *checkpoints.glob(".global_step_*.replaced"))
    )
    if not path.exists() or not (has_rows or has_checkpoint):
        return
    changed = {
        key: values
        for key, values in diff(load_recorded_config(path), config).items()
        if key not in KEYS_MUTABLE_ON_RESUME and not differs_in_secrets_only(key, *values)
    }
    if changed:
        key, (before, now) = next(iter(changed.items()))
        raise ConfigError(
            f"{folder} was started with {key}={before!r} and this run has {now!r}; "
            "give trainer.run_name another name, or trainer.resume_mode=none with an empty folder"
        )


def _reject_rows_without_checkpoint(config: RunConfig) -> None:
    """A killed run has a checkpoint, or only the row before training; anything else was moved."""
    folder = Path(config.trainer.run_path)
    last_step = read_last_step(folder / METRICS)
    if last_step is not None and last_step > 0:
        raise ConfigError(
            f"{folder} already holds a run of {last_step} steps, and {config.trainer.ckpt_path} has "
            "none of its checkpoints; restore them, move the folder away, or give trainer.run_name "
            "another name"
        )
