"""S3: one object read or written whole, tried again when the network or the service falters.

Credentials, region and AWS_ENDPOINT_URL come from the environment, as boto3 reads them. What fails
is an OSError that names the address, as a file's would be.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from time import sleep
from typing import Any

from skyfleet.errors import ConfigError, MissingExtraError

SCHEME = "s3://"
TRIES = 5
FIRST_PAUSE_SECONDS = 0.2

_ABSENT = ("NoSuchKey", "NoSuchBucket", "404")


def read_object(address: str) -> bytes:
    bucket, key = _parts(address)
    with _named(address):
        return _read_whole(bucket, key)


def write_object(address: str, data: bytes) -> None:
    """A reader sees the old object or the new one: S3 shows no partial write."""
    bucket, key = _parts(address)
    with _named(address):
        _client().put_object(Bucket=bucket, Key=key, Body=data)


def _read_whole(bucket: str, key: str) -> bytes:
    """boto3 asks again only until the body begins; one that breaks off is asked for from the start."""
    from botocore.exceptions import HTTPClientError, IncompleteReadError

    attempt, pause = 1, FIRST_PAUSE_SECONDS
    while True:
        body = _client().get_object(Bucket=bucket, Key=key)["Body"]
        try:
            data: bytes = body.read()
            return data
        except (HTTPClientError, IncompleteReadError):
            if attempt == TRIES:
                raise
        sleep(pause)
        attempt, pause = attempt + 1, 2 * pause


def _parts(address: str) -> tuple[str, str]:
    bucket, _, key = address.removeprefix(SCHEME).partition("/")
    if not address.startswith(SCHEME) or not bucket or not key:
        raise ConfigError(f"{address!r} names no object; write s3://bucket/key")
    return bucket, key


@cache
def _client() -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise MissingExtraError("boto3", "s3") from None
    settings = Config(
        retries={"total_max_attempts": TRIES, "mode": "standard"},
        connect_timeout=10,
        read_timeout=60,
    )
    # boto3 itself reads only AWS_DEFAULT_REGION; None leaves the choice to it.
    return boto3.client("s3", region_name=os.environ.get("AWS_REGION"), config=settings)


@contextmanager
def _named(address: str) -> Iterator[None]:
    _client()  # says which extra is missing, before its errors are imported
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code in _ABSENT:
            raise FileNotFoundError(errno.ENOENT, f"no such object ({code})", address) from None
        raise OSError(errno.EIO, f"{error}", address) from error
    except BotoCoreError as error:
        raise OSError(errno.EIO, f"{error}", address) from error
