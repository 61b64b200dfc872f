"""BucketCheckpoints: the checkpoints of one run in a bucket.

The layout is `{address}/global_step_N/…` as on the disk, and `{address}/run/…` for the run's records
(configuration, metrics, reports), without which another machine could not go on. manifest.json, which
has the hash of every file, is written last: a step without it is not complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from skyfleet.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    FileRecord,
    Manifest,
    checkpoint_folder,
    read_checkpoint,
)
from skyfleet.checkpoints.resume import read_step_number
from skyfleet.errors import CheckpointError
from skyfleet.storage.local import atomic_folder, make_folder, write_atomically
from skyfleet.storage.objects import (
    delete_object,
    join,
    list_folders,
    list_objects,
    read_object,
    stat_object,
    write_object,
)
from skyfleet.storage.transfer import Check, Transferred, download_file, hash_object, upload_file

logger = logging.getLogger(__name__)

UploadCheck = Literal["read_back", "checksum"]
RECORDS = "run"


class ChangedFileError(CheckpointError):
    """A local file is not what the checkpoint's manifest says; uploading it again cannot help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCheckpoints:
    address: str
    """Such as s3://bucket/project/model/run."""
    upload_check: UploadCheck = "read_back"

    def step_address(self, step: int) -> str:
        return join(self.address, f"global_step_{step}")

    def list_steps(self) -> list[int]:
        """The steps that have objects, complete or not, the newest first."""
        steps = (read_step_number(name) for name in list_folders(self.address))
        return sorted((step for step in steps if step >= 0), reverse=True)

    def read_manifest(self, step: int) -> Manifest | None:
        """The manifest of a complete step; None if it is missing or cannot be read as one."""
        address = join(self.step_address(step), MANIFEST)
        try:
            manifest = Manifest.model_validate_json(read_object(address))
        except (FileNotFoundError, ValidationError):
            return None
        return manifest if manifest.step == step else None

    def find_newest(self) -> int | None:
        """The newest complete step, by its number: clocks play no part."""
        return next((step for step in self.list_steps() if self.read_manifest(step)), None)

    def list_complete_steps(self) -> list[int]:
        """The newest first."""
        return [step for step in self.list_steps() if self.read_manifest(step)]

    def upload(
        self,
        checkpoint: Checkpoint,
        *,
        before_manifest: Callable[[], None] = lambda: None,
        check: Check = lambda: None,
    ) -> None:
        """Upload every file, verify it, then write the manifest; nothing to do if it is there."""
        step, manifest = checkpoint.step, checkpoint.manifest
        present = self.read_manifest(step)
        if present == manifest:
            return
        folder, marker = self.step_address(step), join(self.step_address(step), MANIFEST)
        unchanged = {} if present is None else present.files
        if self._has_marker(step):
            # The files of the old manifest are replaced one by one, so the step is not complete.
            # Not otherwise: the account may not be allowed to delete.
            delete_object(marker)
        for name, record in manifest.files.items():
            check()
            if unchanged.get(name) != record:
                self._upload_file(checkpoint.folder / name, join(folder, name), record, check)
        self._delete_left(folder, manifest)
        before_manifest()
        check()
        text = (checkpoint.folder / MANIFEST).read_bytes()
        write_object(marker, text)
        if read_object(marker) != text:
            delete_object(marker)
            raise CheckpointError(f"{marker} is not what was written; check the server")

    def _has_marker(self, step: int) -> bool:
        """Also one that cannot be read as a manifest."""
        try:
            stat_object(join(self.step_address(step), MANIFEST))
        except FileNotFoundError:
            return False
        return True

    def _delete_left(self, folder: str, manifest: Manifest) -> None:
        """Remove files of an earlier upload of the step; no reader needs that."""
        for left in list_objects(folder):
            if left.name not in manifest.files:
                try:
                    delete_object(join(folder, left.name))
                except PermissionError as error:
                    logger.warning("%s stays: %s", join(folder, left.name), error)
                    return

    def download(
        self,
        step: int,
        root: Path,
        *,
        choose: Callable[[Manifest], Manifest] = lambda manifest: manifest,
        check: Check = lambda: None,
    ) -> Checkpoint:
        """Copy a complete step, or what `choose` leaves of it, below `root`.

        It appears there when every hash was verified.
        """
        manifest = self.read_manifest(step)
        address = self.step_address(step)
        if manifest is None:
            raise CheckpointError(f"{address} is not a complete checkpoint: it has no {MANIFEST}")
        folder, manifest = checkpoint_folder(root, step), choose(manifest)
        with atomic_folder(folder) as draft:
            for name, record in manifest.files.items():
                _download(join(address, name), _inside(draft, name), record, check)
            (draft / MANIFEST).write_text(manifest.model_dump_json(indent=1))
        return read_checkpoint(folder)

    def upload_records(self, folder: Path, names: Iterable[str]) -> None:
        """Copy the run's records; of a file that grows, its complete lines."""
        for name in names:
            write_object(join(self.address, RECORDS, name), read_record(folder / name))

    def download_records(self, folder: Path, *, leave_out: Collection[str] = ()) -> None:
        for record in list_objects(join(self.address, RECORDS)):
            if record.name in leave_out:
                continue
            path = _inside(folder, record.name)
            make_folder(path.parent)
            write_atomically(path, read_object(join(self.address, RECORDS, record.name)))

    def read_record(self, name: str) -> bytes | None:
        try:
            return read_object(join(self.address, RECORDS, name))
        except FileNotFoundError:
            return None

    def _upload_file(self, path: Path, address: str, record: FileRecord, check: Check) -> None:
        checksum = self.upload_check == "checksum"
        if not path.is_file():
            raise ChangedFileError(f"{path} is missing")
        sent = upload_file(path, address, checksum=checksum, check=check)
        try:
            _compare(sent, record, f"{path} has changed since it was saved")
        except CheckpointError as error:
            raise ChangedFileError(str(error)) from None
        if checksum:
            # The server has compared the hash of every part; the length proves that none is missing.
            size_bytes = stat_object(address).size_bytes
            if size_bytes != record.size_bytes:
                raise CheckpointError(
                    f"{address} has {size_bytes} bytes, not {record.size_bytes}; check the server"
                )
        else:
            _compare(hash_object(address, check=check), record, f"{address} is not what was sent")


def read_record(path: Path) -> bytes:
    """A file's bytes; of JSON lines the complete ones, because another thread may be writing."""
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1] if path.suffix == ".jsonl" else data


def _download(address: str, path: Path, record: FileRecord, check: Check) -> None:
    make_folder(path.parent)
    try:
        received = download_file(address, path, check=check)
    except FileNotFoundError:
        raise CheckpointError(f"{address} is missing") from None
    _compare(received, record, f"{address} has changed since it was uploaded")


def _compare(found: Transferred, record: FileRecord, sentence: str) -> None:
    if (found.size_bytes, found.sha256) != (record.size_bytes, record.sha256):
        raise CheckpointError(
            f"{sentence} ({found.size_bytes} bytes, sha256 {found.sha256[:8]}…; saved "
            f"{record.size_bytes} bytes, {record.sha256[:8]}…)"
        )


def _inside(folder: Path, name: str) -> Path:
    """A manifest or a listing comes from outside: its names must not leave the folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or path == folder.resolve():
        raise CheckpointError(f"{name!r} is not the name of a file in a checkpoint")
    return path
