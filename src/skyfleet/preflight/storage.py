"""Checks of storage: the run's folders and buckets can be written, read and cleaned up."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from skyfleet.errors import SkyfleetError, is_outage, require_torch
from skyfleet.preflight.check import (
    CheckFailedError,
    NotCheckedError,
    Subject,
    UnreachableError,
    check,
)
from skyfleet.preflight.keys import list_buckets
from skyfleet.storage.local import find_existing_folder
from skyfleet.storage.objects import has_credentials
from skyfleet.storage.store import delete_bytes, read_bytes, write_bytes

_CONTENT = b"skyfleet preflight"


@check("run folders", "machine")
def check_folders(subject: Subject) -> str:
    """Every folder that the run writes to; and no other run holds them."""
    trainer = subject.config.trainer
    folders = {
        "trainer.run_path": trainer.run_path,
        "trainer.ckpt_path": trainer.ckpt_path,
        "trainer.export_path": trainer.export_path,
    }
    problems, start = [], None
    for key, value in folders.items():
        root = find_existing_folder(Path(value))
        try:
            # A folder of our own, so that nothing of the run's is touched.
            with TemporaryDirectory(prefix=".preflight-", dir=root) as folder:
                (Path(folder) / "file").write_bytes(_CONTENT)
        except OSError as error:
            problems.append(
                f"{key}={value} cannot be written: {root}: {error.strerror}; choose another folder"
            )
    if not problems:
        require_torch()
        from skyfleet.trainer.resuming import check_startable, describe_start

        try:
            start = describe_start(subject.config, check_startable(subject.config))
        except SkyfleetError as error:
            problems.append(str(error))
    if problems:
        raise CheckFailedError("\n".join(problems))
    return start or f"{trainer.run_path} can be written"


@check("trainer.ckpt_bucket", "storage", timeout_seconds=120)
def check_checkpoint_bucket(subject: Subject) -> str | None:
    return _check_bucket(subject, "trainer.ckpt_bucket")


@check("trainer.trajectory_bucket", "storage", timeout_seconds=120)
def check_trajectory_bucket(subject: Subject) -> str | None:
    return _check_bucket(subject, "trainer.trajectory_bucket")


def _check_bucket(subject: Subject, key: str) -> str | None:
    """Write an object, read it, delete it."""
    bucket = list_buckets(subject.config).get(key)
    if bucket is None:
        return None
    if not has_credentials(bucket):
        raise NotCheckedError(f"no credentials for {bucket}, so nothing is uploaded to {key}")
    return check_bucket(bucket, key)


def check_bucket(bucket: str, key: str) -> str:
    """Raise CheckFailedError unless the bucket, or the folder, can be written, read and cleaned up."""
    address = f"{bucket.rstrip('/')}/.preflight-{uuid4().hex}"
    remedy = f"check {key}, its region and endpoint, and that the credentials may write there"
    stage = "written"
    try:
        write_bytes(address, _CONTENT)
        stage = "read"
        found = read_bytes(address)
        stage = "deleted from"
        delete_bytes(address)
    except OSError as error:
        kind = UnreachableError if is_outage(error) else CheckFailedError
        raise kind(
            f"{key}={bucket} cannot be {stage}: {error.strerror or error}; {remedy}"
        ) from None
    if found != _CONTENT:
        raise CheckFailedError(f"{key}={bucket} returns other bytes than were written; {remedy}")
    return f"{bucket} can be written, read and cleaned up"
