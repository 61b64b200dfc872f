"""Where a run's files are in its buckets, and which of them there are."""

from __future__ import annotations

import logging
from pathlib import Path, PurePath

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.storage.objects import has_credentials, join, list_folders
from skyfleet.storage.store import read_bucket

logger = logging.getLogger(__name__)

REPORT = "report.html"
_RECORDS = ("config.yaml", "metrics.jsonl", "timing.jsonl", "sentinels.jsonl", "results.md")


def list_records(folder: Path) -> list[str]:
    """The files that another machine needs to go on with a run, relative to its folder."""
    reports = sorted(folder.glob("reports/step_*/[!.]*"))
    found = [folder / name for name in _RECORDS if (folder / name).is_file()]
    return [path.relative_to(folder).as_posix() for path in (*found, *reports)]


def locate_checkpoints(config: RunConfig) -> BucketCheckpoints | None:
    """The run's checkpoints in `trainer.ckpt_bucket`, at {project}/{model}/{run}; None without one."""
    trainer = config.trainer
    if trainer.ckpt_bucket is None:
        return None
    model = PurePath(trainer.policy.model.path).name
    bucket = read_bucket(trainer.ckpt_bucket)
    return BucketCheckpoints(
        address=join(bucket, trainer.project_name, model, trainer.run_name),
        upload_check=trainer.ckpt_upload_check,
    )


def locate_locks(config: RunConfig) -> list[str]:
    """The addresses under which one process at a time uploads.

    Runs of one name and two models have checkpoints of their own and the same episodes, so each bucket
    has a lock.
    """
    trainer, checkpoints = config.trainer, locate_checkpoints(config)
    addresses = [] if checkpoints is None else [checkpoints.address]
    if trainer.trajectory_bucket is not None:
        addresses.append(join(read_bucket(trainer.trajectory_bucket), "runs", trainer.run_name))
    return addresses


def check_buckets(config: RunConfig) -> None:
    """Raise before the run starts if a bucket does not exist or refuses."""
    trainer, checkpoints = config.trainer, locate_checkpoints(config)
    addresses = {"ckpt_bucket": checkpoints.address} if checkpoints else {}
    if trainer.trajectory_bucket is not None:
        bucket = read_bucket(trainer.trajectory_bucket)
        addresses["trajectory_bucket"] = join(bucket, "evals", trainer.run_name)
    for key, address in addresses.items():
        try:
            list_folders(address)
        except FileNotFoundError:
            problem = "the bucket does not exist; create it, or correct its name"
        except PermissionError as error:
            problem = f"the bucket may not be listed ({error.strerror}); allow it, or export other credentials"
        else:
            continue
        raise ConfigError(f"trainer.{key}={getattr(trainer, key)!r}: {problem}") from None


def drop_buckets_without_credentials(config: RunConfig) -> RunConfig:
    """The configuration without buckets for which there are no credentials; says so once."""
    trainer = config.trainer
    named = {"ckpt_bucket": trainer.ckpt_bucket, "trajectory_bucket": trainer.trajectory_bucket}
    given = {key: read_bucket(value) for key, value in named.items() if value}
    dropped = {key: address for key, address in given.items() if not has_credentials(address)}
    if not dropped:
        return config
    listed = " and ".join(f"trainer.{key} ({address})" for key, address in dropped.items())
    logger.warning(
        "no credentials for %s: nothing is uploaded, and everything stays on this machine; set "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or those of the bucket's cloud",
        listed,
    )
    without = trainer.model_copy(update=dict.fromkeys(dropped))
    return config.model_copy(update={"trainer": without})
