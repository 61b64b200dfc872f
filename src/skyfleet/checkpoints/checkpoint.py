"""Checkpoint: one saved step, with a manifest of every file in it.

`{root}/global_step_N/{part}/…` and `{root}/global_step_N/manifest.json`; a folder without the
manifest, or without a file that it names, is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.errors import CheckpointError

MANIFEST = "manifest.json"


class Saveable(Protocol):
    """Something that can put itself in an empty folder and come back from it."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Stateful(Protocol):
    """Something whose state is plain JSON."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class JsonPart:
    """Makes a `Stateful` saveable, as `state.json`."""

    owner: Stateful

    def save(self, folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(dict(self.owner.state_dict())))

    def load(self, folder: Path) -> None:
        self.owner.load_state_dict(json.loads((folder / "state.json").read_text()))


class FileRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(size_bytes=path.stat().st_size, sha256=digest)


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    skyfleet_version: str
    parts: tuple[str, ...]
    files: dict[str, FileRecord]
    """By path inside the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises unless every file is there in its full size; hashes wait until it is loaded."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: {MANIFEST}: {error.strerror}; "
            "choose a global_step_N folder that has one"
        ) from None
    except ValidationError as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: {MANIFEST} has {error.error_count()} fields "
            "that cannot be read; choose another checkpoint"
        ) from None
    for name, record in manifest.files.items():
        path = folder / name
        size_bytes = path.stat().st_size if path.is_file() else None
        if size_bytes != record.size_bytes:
            found = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise CheckpointError(
                f"{folder} is not a complete checkpoint: {name} {found} and should have "
                f"{record.size_bytes} bytes; choose another checkpoint"
            )
    return Checkpoint(folder=folder, manifest=manifest)
