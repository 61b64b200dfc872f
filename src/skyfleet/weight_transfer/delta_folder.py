"""DeltaFolder: versions of weights in a folder or in a bucket, each complete or absent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from skyfleet.storage.local import atomic_folder, discard, sweep
from skyfleet.storage.objects import delete_object, is_address, join, list_folders, list_objects
from skyfleet.storage.store import read_bytes, write_bytes
from skyfleet.storage.transfer import download_file, upload_file
from skyfleet.weight_transfer.delta_format import (
    FORMAT,
    MANIFEST,
    FileRecord,
    Kind,
    Manifest,
    folder_name,
    parse_folder_name,
)


class DamagedVersionError(Exception):
    """A file of a version is missing or is not what its manifest says."""


class DeltaFolder:
    def __init__(self, address: str) -> None:
        """A path, or the address of a folder in a bucket."""
        self.address = address if is_address(address) else str(Path(address).expanduser())
        self._is_remote = is_address(address)

    def locate(self, *names: str) -> str:
        return join(self.address, *names)

    def list_versions(self) -> list[tuple[Kind, int]]:
        """Those whose folder exists, in order; one may lack its manifest."""
        if self._is_remote:
            names = list_folders(self.address)
        else:
            path = Path(self.address)
            names = [child.name for child in path.iterdir()] if path.is_dir() else []
        found = [parsed for name in names if (parsed := parse_folder_name(name)) is not None]
        return sorted(found, key=lambda version: (version[1], version[0]))

    def read_manifest(self, kind: Kind, version: int) -> Manifest | None:
        """None for a version that does not exist, or not yet; DamagedVersionError for nonsense."""
        address = self.locate(folder_name(kind, version), MANIFEST)
        try:
            manifest = Manifest.model_validate_json(read_bytes(address))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise DamagedVersionError(f"{address} is no manifest of weights") from error
        if manifest.format != FORMAT:
            raise DamagedVersionError(
                f"{address} has format {manifest.format}, and this version of skyfleet reads {FORMAT}"
            )
        return manifest

    @contextmanager
    def write(self, kind: Kind, version: int) -> Iterator[Path]:
        """Yield a local folder to write files and a manifest to, which then appear at once.

        A version that is written again, as after a resume, loses its old manifest first.
        """
        name = folder_name(kind, version)
        if not self._is_remote:
            with atomic_folder(Path(self.address) / name) as draft:
                yield draft
            return
        with TemporaryDirectory(prefix="skyfleet-delta-") as staging:
            yield Path(staging)
            delete_object(self.locate(name, MANIFEST))
            for path in sorted(Path(staging).iterdir()):
                if path.name != MANIFEST:
                    upload_file(path, self.locate(name, path.name))
            write_bytes(self.locate(name, MANIFEST), (Path(staging) / MANIFEST).read_bytes())

    @contextmanager
    def open_file(self, manifest: Manifest, record: FileRecord) -> Iterator[Path]:
        """Yield a verified local file; DamagedVersionError if its hash is another."""
        address = self.locate(folder_name(manifest.kind, manifest.version), record.name)
        with TemporaryDirectory(prefix="skyfleet-delta-") as staging:
            try:
                if self._is_remote:
                    path = Path(staging) / record.name
                    digest = download_file(address, path).sha256
                else:
                    path = Path(address)
                    digest = hash_file(path)
            except FileNotFoundError as error:
                raise DamagedVersionError(f"{address} is missing") from error
            if digest != record.sha256:
                raise DamagedVersionError(f"{address} is not what its manifest says")
            yield path

    def remove(self, kind: Kind, version: int) -> None:
        """The manifest goes first, so that no reader starts with it."""
        name = folder_name(kind, version)
        if not self._is_remote:
            if (path := Path(self.address) / name).is_dir():
                discard(path)
            return
        delete_object(self.locate(name, MANIFEST))
        for info in list_objects(self.locate(name)):
            delete_object(self.locate(name, info.name))

    def sweep(self) -> None:
        """Remove what a killed publisher left half written."""
        if not self._is_remote and Path(self.address).is_dir():
            for kind in ("full", "delta"):
                sweep(Path(self.address), f"{kind}-*")

    def clear(self) -> None:
        for kind, version in self.list_versions():
            self.remove(kind, version)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
