"""How a run starts: hold its folder, clean up after a killed process, find where to resume."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from skyfleet.checkpoints.checkpoint import (
    Checkpoint,
    checkpoint_folder,
    read_checkpoint,
)
from skyfleet.checkpoints.resume import (
    ResumeMode,
    find_checkpoint,
    find_verified_checkpoint,
    verify_checkpoint,
)
from skyfleet.checkpoints.saving import sweep_checkpoints
from skyfleet.config.keys import diff
from skyfleet.config.loading import load_recorded_config, parse_recorded_config
from skyfleet.config.redaction import differs_in_secrets_only
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.evaluation.report import remove_reports_after
from skyfleet.storage.folder_lock import FolderLock, check_not_in_use, lock_folders
from skyfleet.storage.local import sweep
from skyfleet.storage.step_rows import read_last_step
from skyfleet.storage.store import is_remote
from skyfleet.trainer.bucket_layout import locate_checkpoints
from skyfleet.trainer.exports import sweep_exports
from skyfleet.trainer.restoring import (
    check_complete,
    download_newer,
    download_reference,
    download_resume_path,
    open_bucket_step,
    read_bucket_config,
)
from skyfleet.trajectories.archive import remove_episodes_after

logger = logging.getLogger(__name__)

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
    "trainer.journal",
    "trainer.ckpt_bucket",
    "trainer.trajectory_bucket",
    "trainer.ckpt_upload_check",
    "trainer.upload_timeout_seconds",
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
    "generator.delta_weight_sync.sync_dir",
    "generator.probe_timeout_seconds",
    "trainer.sentinels.mode",
    "trainer.sentinels.modes",
    "trainer.fully_async.num_parallel_generation_workers",
    "trainer.fully_async.clear_kv_cache_on_weight_sync",
    "trainer.gradient_checkpointing",
    "trainer.loss_chunk_size",
    "trainer.max_tokens_per_microbatch",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.policy.optimizer_config.offload_after_step",
    "trainer.critic.optimizer_config.offload_after_step",
    "trainer.ref.fsdp_config.cpu_offload",
    "trainer.strategy",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "trainer.placement.rank_timeout_seconds",
    "trainer.policy.fsdp_config.cpu_offload",
    "trainer.policy.fsdp_config.reshard_after_forward",
    "trainer.policy.fsdp_config.fsdp_size",
    "trainer.policy.sequence_parallel_size",
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

_PATH_KEYS = ("trainer.run_path", "trainer.ckpt_path", "trainer.export_path")
"""Differ on another machine."""
PLACE_KEYS = (*_PATH_KEYS, "trainer.run_name")
"""Not in the configuration that a checkpoint holds, because its folder may be moved."""


def hold_run_folders(
    config: RunConfig, on_progress: Callable[[str], None]
) -> AbstractAsyncContextManager[list[FolderLock]]:
    """Lock the run folder and the checkpoint folder, which another run may name, too."""
    return lock_folders(_list_locked_folders(config), on_progress)


def check_startable(config: RunConfig) -> Checkpoint | None:
    """What a run would resume from, or its error; for a dry run, which holds and changes nothing."""
    for folder in _list_locked_folders(config):
        check_not_in_use(folder)
    path = str(config.trainer.resume_path)
    if config.trainer.resume_mode == "from_path" and is_remote(path):
        reject_other_run(config)
        bucket, step = open_bucket_step(path)
        check_complete(bucket, step)
        return None
    return find_resume_checkpoint(config)


def _list_locked_folders(config: RunConfig) -> list[Path]:
    run, checkpoints = Path(config.trainer.run_path), Path(config.trainer.ckpt_path)
    return [run] if checkpoints.resolve() == run.resolve() else [run, checkpoints]


def prepare_folders(
    config: RunConfig, on_progress: Callable[[str], None] = lambda _: None
) -> Checkpoint | None:
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
    return _find_in_bucket(config, on_progress) or find_resume_checkpoint(config)


def _find_in_bucket(config: RunConfig, on_progress: Callable[[str], None]) -> Checkpoint | None:
    """Download the checkpoint to resume from, with the run's records, if it is newer than local ones."""
    trainer, bucket = config.trainer, locate_checkpoints(config)
    if trainer.resume_mode == "from_path" and is_remote(str(trainer.resume_path)):
        download_resume_path(config, on_progress)
        return None
    if bucket is None or trainer.resume_mode == "from_path":
        return None
    if trainer.resume_mode == "none":
        if steps := bucket.list_steps():
            raise ConfigError(
                f"trainer.resume_mode=none, but {bucket.step_address(steps[0])} exists; give "
                "trainer.run_name (run_dir= in Python) another name, or resume with "
                "trainer.resume_mode=latest"
            )
        return None
    recorded = read_bucket_config(bucket)
    if recorded is not None:
        _reject_changes(recorded, config, bucket.address, exempt=_PATH_KEYS)
    try:
        local = _find_own_checkpoint(config)
    except CheckpointError as damage:
        if trainer.resume_strict:
            raise
        logger.warning("%s", damage)
        local = None
    newer = download_newer(config, bucket, -1 if local is None else local.step, on_progress)
    if (found := newer or local) is not None:
        download_reference(config, bucket, found)
    return found


def _read_resume_path(config: RunConfig) -> Checkpoint:
    path = str(config.trainer.resume_path)
    if not is_remote(path):
        return read_checkpoint(Path(path))
    return read_checkpoint(
        checkpoint_folder(Path(config.trainer.ckpt_path), open_bucket_step(path)[1])
    )


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
    elif not (Path(config.trainer.run_path) / CONFIG).exists():
        _reject_changes_of_checkpoint(found, config)
    return found


def _reject_changes_of_checkpoint(checkpoint: Checkpoint, config: RunConfig) -> None:
    """For a run folder without config.yaml: the checkpoint holds it, except in earlier versions."""
    path = checkpoint.folder / "trainer" / "state.json"
    # Not through TrainerState, whose module imports torch.
    recorded = json.loads(path.read_text()).get("config") if path.exists() else None
    if recorded:
        _reject_changes(
            parse_recorded_config(recorded),
            config,
            str(checkpoint.folder),
            exempt=PLACE_KEYS,
        )


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
    given = _read_resume_path(config)
    newest = find_checkpoint(Path(trainer.ckpt_path), "latest")
    if newest is not None and newest.step > given.step:
        if not _repeats_resume_path(config):
            raise ConfigError(
                f"trainer.resume_path={trainer.resume_path!r} is step {given.step} and "
                f"{newest.folder} is later; move it away, or give trainer.run_name (run_dir= "
                "in Python) another name"
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
                f"{folder} already holds a run; give trainer.run_name (run_dir= in Python) another "
                "name, move the folder away, or resume it with trainer.resume_mode=latest"
            )
        return
    path = folder / CONFIG
    checkpoints = Path(trainer.ckpt_path)
    has_checkpoint = trainer.resume_mode == "from_path" or any(
        (*checkpoints.glob("global_step_*"), *checkpoints.glob(".global_step_*.replaced"))
    )
    if not path.exists() or not (has_rows or has_checkpoint):
        return
    _reject_changes(load_recorded_config(path), config, str(folder))


def _reject_changes(
    recorded: RunConfig, config: RunConfig, where: str, *, exempt: Collection[str] = ()
) -> None:
    changed = {
        key: values
        for key, values in diff(recorded, config).items()
        if key not in (*KEYS_MUTABLE_ON_RESUME, *exempt)
        and not differs_in_secrets_only(key, *values)
    }
    if changed:
        key, (before, now) = next(iter(changed.items()))
        raise ConfigError(
            f"{where} was started with {key}={before!r} and this run has {now!r}; "
            "give trainer.run_name (run_dir= in Python) another name"
        )


def _reject_rows_without_checkpoint(config: RunConfig) -> None:
    """A killed run has a checkpoint, or only the row before training; anything else was moved."""
    folder = Path(config.trainer.run_path)
    last_step = read_last_step(folder / METRICS)
    if last_step is not None and last_step > 0:
        raise ConfigError(
            f"{folder} already holds a run of {last_step} steps, and {config.trainer.ckpt_path} has "
            "none of its checkpoints; restore them, move the folder away, or give trainer.run_name "
            "(run_dir= in Python) another name"
        )
