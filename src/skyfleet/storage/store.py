"""Read and write bytes at a local path or an address in a bucket: s3://, gs:// or az://."""

from __future__ import annotations

from pathlib import Path

from skyfleet.errors import ConfigError
from skyfleet.storage.local import write_atomically
from skyfleet.storage.objects import delete_object, is_address, read_object, write_object


def is_remote(address: Path | str) -> bool:
    return is_address(address)


def read_bytes(address: Path | str) -> bytes:
    """Read a file or an object; FileNotFoundError if it does not exist."""
    if is_remote(address):
        return read_object(str(address))
    return Path(address).read_bytes()


def write_bytes(address: Path | str, data: bytes) -> None:
    """Write a file or an object atomically, replacing the old content."""
    if is_remote(address):
        write_object(str(address), data)
        return
    path = Path(address)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)


def delete_bytes(address: Path | str) -> None:
    """Remove a file or an object; one that does not exist is no error."""
    if is_remote(address):
        delete_object(str(address))
        return
    Path(address).unlink(missing_ok=True)


def sibling_address(address: Path | str, name: str) -> str:
    """Return the address of a sibling: `beside("s3://b/data/train.parquet", "manifest.json")` is s3://b/data/manifest.json."""
    folder, slash, _ = str(address).rpartition("/")
    return f"{folder}{slash}{name}"


def read_bucket(value: str) -> str:
    """The address of `trainer.ckpt_bucket` or `trainer.trajectory_bucket`; a bare name is in S3."""
    if is_address(value):
        return value.rstrip("/")
    if "://" in value:
        raise ConfigError(
            f"trainer.ckpt_bucket or trainer.trajectory_bucket is {value!r}, whose scheme is unknown; "
            "use s3://, gs://, az://, a path, or the bare name of a bucket in S3"
        )
    if value.startswith(("/", ".", "~")):
        return str(Path(value).expanduser().absolute())
    return f"s3://{value}"
