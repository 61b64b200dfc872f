"""Objects in S3, Google Cloud Storage, Azure and folders, through obstore.

An address is `s3://bucket/key`, `gs://bucket/key`, `az://container/key` or a path. Credentials,
region and endpoint come from the environment (`storage.credentials`). An error is an OSError with
the address as its filename, as for a local file.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

from skyfleet.errors import ConfigError
from skyfleet.storage.credentials import (
    VARIABLES,
    check_aws_keys,
    check_endpoints,
    has_empty_credentials,
    hide_empty_variables,
    names_credentials,
    read_aws_profile,
)
from skyfleet.storage.obstore_errors import classify_error, explain_errors, import_obstore

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

SCHEMES = ("s3://", "gs://", "az://")
MAX_ATTEMPTS = 8
"""Within about 25 seconds: a run starts although its server restarts."""
FIRST_BACKOFF_SECONDS = 0.2
_RETRY_SECONDS = 120
_CONNECT_SECONDS = 10
_REQUEST_SECONDS = 120
"""Of one request with its body, which is a part of a large object (`storage.transfer`)."""
_METADATA_SERVICES = ("169.254.", "metadata.google", "/latest/", "instance metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    name: str
    """Relative to the address that was listed."""
    size_bytes: int
    version: str
    """Differs after the object was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A key in an opened store."""

    store: ObjectStore
    key: str


def is_address(address: Path | str) -> bool:
    """Whether it names an object or a bucket, not a path."""
    return str(address).startswith(SCHEMES)


def join(address: str, *names: str) -> str:
    """`join("s3://b/run/", "a", "c.json")` is `s3://b/run/a/c.json`."""
    return "/".join([address.rstrip("/"), *names])


def read_object(address: str) -> bytes:
    place = open_place(address)
    with explain_errors(address):
        return bytes(read_range(place, None))


def read_range(place: Place, span: tuple[int, int] | None) -> Bytes:
    """Read an object, or the bytes from one offset to another; an interrupted body is read again.

    The memory stays obstore's: a copy of every part would double what a transfer needs.
    """
    import obstore

    attempt, backoff_seconds = 1, FIRST_BACKOFF_SECONDS
    while True:
        try:
            if span is None:
                return obstore.get(place.store, place.key).bytes()
            start, end = span
            return obstore.get_range(place.store, place.key, start=start, end=end)
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            if attempt == MAX_ATTEMPTS or not _is_transient(error):
                raise
        sleep(backoff_seconds)
        attempt, backoff_seconds = attempt + 1, 2 * backoff_seconds


def write_object(address: str, data: bytes) -> None:
    """Replace an object; a reader sees the old or the new one."""
    import_obstore()
    import obstore

    place = open_place(address)
    with explain_errors(address):
        obstore.put(place.store, place.key, data, use_multipart=False)


def delete_object(address: str) -> None:
    """Remove an object; one that does not exist is no error."""
    import_obstore()
    import obstore

    place = open_place(address)
    with explain_errors(address):
        try:
            obstore.delete(place.store, place.key)
        except FileNotFoundError:
            return


def stat_object(address: str) -> ObjectInfo:
    import_obstore()
    import obstore

    place = open_place(address)
    with explain_errors(address):
        return _describe(obstore.head(place.store, place.key), "")


def list_objects(address: str) -> list[ObjectInfo]:
    """Every object below an address, by name, without what marks a folder in S3's console or s3fs."""
    import_obstore()
    import obstore

    place = open_place(address, needs_key=False)
    prefix = f"{place.key}/" if place.key else ""
    with explain_errors(address):
        found = [
            _describe(entry, prefix)
            for batch in obstore.list(place.store, prefix or None)
            for entry in batch
            if entry["path"].startswith(prefix)  # the key of a marker is the prefix itself
        ]
    folders = {info.name[:at] for info in found for at in _find_slashes(info.name)}
    files = [info for info in found if info.size_bytes or info.name not in folders]
    return sorted(files, key=lambda info: info.name)


def _find_slashes(name: str) -> list[int]:
    return [at for at, character in enumerate(name) if character == "/"]


def list_folders(address: str) -> list[str]:
    """The names directly below an address that have objects below them."""
    import_obstore()
    import obstore

    place = open_place(address, needs_key=False)
    prefix = f"{place.key}/" if place.key else ""
    with explain_errors(address):
        found = obstore.list_with_delimiter(place.store, prefix or None)["common_prefixes"]
    return sorted(name.rstrip("/").rpartition("/")[2] for name in found)


def has_credentials(address: str) -> bool:
    """Whether requests to a bucket can be signed; a path needs nothing.

    Without a variable or file that names credentials, the metadata service of a cloud's machine is
    asked, through a request to the bucket.
    """
    scheme = address.partition("://")[0]
    if not is_address(address) or names_credentials(scheme):
        return True
    if has_empty_credentials(scheme):
        return False
    import_obstore()
    import obstore

    place = open_place(address, needs_key=False, attempts=1, request_seconds=3)
    try:
        obstore.list_with_delimiter(place.store, place.key or None)
    except FileNotFoundError:
        return True  # a signed answer: no such bucket
    except Exception as error:
        return not any(name in str(error) for name in _METADATA_SERVICES)
    return True


def open_place(
    address: str,
    *,
    needs_key: bool = True,
    checksum: bool = False,
    attempts: int | None = None,
    request_seconds: float = _REQUEST_SECONDS,
) -> Place:
    """The store and key of an address; with `checksum`, S3 checks a SHA-256 of all it receives."""
    import_obstore()
    if not is_address(address):
        path = Path(address).expanduser().absolute()
        # A key is relative to the root, so that one store serves every folder.
        return Place(store=_open_folder(path.anchor), key=path.relative_to(path.anchor).as_posix())
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket or (needs_key and not key):
        raise ConfigError(
            f"{address!r} is not the address of an object; write {scheme}://bucket/key"
        )
    environment = frozenset(
        (name, value) for name, value in os.environ.items() if name.startswith(VARIABLES)
    )
    check_endpoints()
    if scheme == "s3":
        check_aws_keys(os.environ)
    attempts = MAX_ATTEMPTS if attempts is None else attempts
    with explain_errors(address):
        store = _open_bucket(scheme, bucket, checksum, attempts, request_seconds, environment)
    return Place(store=store, key=key.strip("/"))


@lru_cache(maxsize=64)
def _open_bucket(
    scheme: str,
    bucket: str,
    checksum: bool,
    attempts: int,
    request_seconds: float,
    environment: frozenset[Any],
) -> ObjectStore:
    """`environment` is part of the key: changed credentials open another store."""
    from obstore.store import AzureStore, GCSStore, S3Store

    client: Any = {
        "allow_http": True,  # of an endpoint that the user names
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        "timeout": timedelta(seconds=request_seconds),
    }
    retries: Any = {
        "max_retries": attempts - 1,
        "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_BACKOFF_SECONDS),
            "max_backoff": timedelta(seconds=15),
            "base": 2,
        },
    }
    options: Any = {"client_options": client, "retry_config": retries}
    with hide_empty_variables():
        if scheme == "gs":
            return GCSStore(bucket, **options)
        if scheme == "az":
            return AzureStore(bucket, **options)
        profile = read_aws_profile()
        settings: Any = {
            **profile.pop("config", {}),
            **({"checksum_algorithm": "SHA256"} if checksum else {}),
        }
        return S3Store(bucket, config=settings, **options, **profile)


@lru_cache
def _open_folder(root: str) -> ObjectStore:
    from obstore.store import LocalStore

    return LocalStore(root)


def _is_transient(error: Exception) -> bool:
    """obstore retries requests; what is left is a body that ended early."""
    return "Server returned" not in str(error) and classify_error(error) == errno.EIO


def _describe(entry: Any, prefix: str) -> ObjectInfo:
    return ObjectInfo(
        name=entry["path"].removeprefix(prefix),
        size_bytes=entry["size"],
        version=entry["e_tag"] or str(entry["last_modified"]),
    )
