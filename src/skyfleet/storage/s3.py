"""Read and write whole S3 objects, with retries.

Credentials, region and AWS_ENDPOINT_URL come from the environment, as boto3 reads them. An error is
an OSError with the address as its filename, as for a local file.
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
MAX_ATTEMPTS = 5
FIRST_BACKOFF_SECONDS = 0.2

_NOT_FOUND_CODES = ("NoSuchKey", "NoSuchBucket", "404")


def read_object(address: str) -> bytes:
    bucket, key = _parse_address(address)
    with _with_address(address):
        return _read_whole(bucket, key)


def write_object(address: str, data: bytes) -> None:
    """Replace an object; a reader sees the old or the new one, because S3 writes are atomic."""
    bucket, key = _parse_address(address)
    with _with_address(address):
        _client().put_object(Bucket=bucket, Key=key, Body=data)


def delete_object(address: str) -> None:
    """Remove an object; one that does not exist is no error."""
    bucket, key = _parse_address(address)
    with _with_address(address):
        _client().delete_object(Bucket=bucket, Key=key)


def _read_whole(bucket: str, key: str) -> bytes:
    """Read an object; boto3 retries only until the body starts, so an interrupted body is retried here."""
    from botocore.exceptions import HTTPClientError, IncompleteReadError

    attempt, backoff_seconds = 1, FIRST_BACKOFF_SECONDS
    while True:
        body = _client().get_object(Bucket=bucket, Key=key)["Body"]
        try:
            data: bytes = body.read()
            return data
        except (HTTPClientError, IncompleteReadError):
            if attempt == MAX_ATTEMPTS:
                raise
        sleep(backoff_seconds)
        attempt, backoff_seconds = attempt + 1, 2 * backoff_seconds


def _parse_address(address: str) -> tuple[str, str]:
    bucket, _, key = address.removeprefix(SCHEME).partition("/")
    if not address.startswith(SCHEME) or not bucket or not key:
        raise ConfigError(f"{address!r} is not the address of an object; write s3://bucket/key")
    return bucket, key


@cache
def _client() -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise MissingExtraError("boto3", "s3") from None
    settings = Config(
        retries={"total_max_attempts": MAX_ATTEMPTS, "mode": "standard"},
        connect_timeout=10,
        read_timeout=60,
    )
    # boto3 reads only AWS_DEFAULT_REGION; None keeps its default.
    return boto3.client("s3", region_name=os.environ.get("AWS_REGION"), config=settings)


@contextmanager
def _with_address(address: str) -> Iterator[None]:
    _client()  # Raises MissingExtraError before botocore is imported.
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code in _NOT_FOUND_CODES:
            raise FileNotFoundError(errno.ENOENT, f"no such object ({code})", address) from None
        raise OSError(errno.EIO, f"{error}", address) from error
    except BotoCoreError as error:
        raise OSError(errno.EIO, f"{error}", address) from error
