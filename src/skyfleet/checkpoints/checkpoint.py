"""Checkpoint: one saved step, with a manifest of its files.

The layout is `{root}/global_step_N/{part}/…` and `{root}/global_step_N/manifest.json`. A folder
without the manifest, or without a file that the manifest lists, is not a checkpoint.
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
    """A component that saves itself to an empty folder and loads itself from it."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Stateful(Protocol):
    """A component whose state is plain JSON."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class JsonPart:
    """Saves a `Stateful` component as `state.json`."""

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
    """By path relative to the checkpoint folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    folder: Path
    manifest: Manifest
    verified: bool = False
    """The hash of every file was checked."""

    @property
    def step(self) -> int:
        return self.manifest.step


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint and check the size of every file; `verify_checkpoint` checks the hashes."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: {MANIFEST}: {error.strerror}; "
            "choose a global_step_N folder that has one"
        ) from None
    except ValidationError as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: {MANIFEST} has {error.error_count()} invalid "
            "fields; choose another checkpoint"
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
