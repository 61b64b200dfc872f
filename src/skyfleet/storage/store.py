"""Store: bytes at a path or at an s3:// address, by the same two functions."""

from __future__ import annotations

from pathlib import Path

from skyfleet.storage.local import write_atomically
from skyfleet.storage.s3 import SCHEME, read_object, write_object


def is_remote(address: Path | str) -> bool:
    return str(address).startswith(SCHEME)


def read_bytes(address: Path | str) -> bytes:
    """FileNotFoundError where nothing is, whichever kind of address it is."""
    if is_remote(address):
        return read_object(str(address))
    return Path(address).read_bytes()


def write_bytes(address: Path | str, data: bytes) -> None:
    """All of it or nothing; what was there is replaced."""
    if is_remote(address):
        write_object(str(address), data)
        return
    path = Path(address)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)


def beside(address: Path | str, name: str) -> str:
    """`beside("s3://b/data/train.parquet", "manifest.json")` is s3://b/data/manifest.json."""
    folder, slash, _ = str(address).rpartition("/")
    return f"{folder}{slash}{name}"
