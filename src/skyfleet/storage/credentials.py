"""Credentials of buckets: what obstore does not read itself, and whether there are any.

obstore reads the environment variables of each cloud, web identities, and the metadata services of
containers and virtual machines. It does not read AWS's shared files, which are read here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from configparser import ConfigParser, Error
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from skyfleet.errors import ConfigError
from skyfleet.redaction import redact

VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "HOME")
"""What the environment variables that obstore reads begin with."""

_NAMES = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_SKIP_SIGNATURE",
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_SKIP_SIGNATURE",
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_STORAGE_USE_EMULATOR",
        "AZURE_STORAGE_TOKEN",
    ),
}
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_changing_environment = Lock()
_GCLOUD = Path(".config/gcloud/application_default_credentials.json")


def names_credentials(scheme: str) -> bool:
    """Whether the environment or a file names credentials; a metadata service may have others."""
    if any(os.environ.get(name) for name in _NAMES[scheme]):
        return True
    if scheme == "s3":
        return bool(read_aws_profile())
    return scheme == "gs" and (Path.home() / _GCLOUD).is_file()


def has_empty_credentials(scheme: str) -> bool:
    """A variable is set to nothing, as a workflow does with a secret that does not exist."""
    return not names_credentials(scheme) and any(name in os.environ for name in _NAMES[scheme])


@contextmanager
def hide_empty_variables() -> Iterator[None]:
    """Without the variables that are set to nothing, as task files and workflows do.

    obstore takes them for values, and an empty endpoint makes it panic.
    """
    with _changing_environment:
        empty = [
            name for name, value in os.environ.items() if name.startswith(VARIABLES) and not value
        ]
        for name in empty:
            del os.environ[name]
        try:
            yield
        finally:
            os.environ.update(dict.fromkeys(empty, ""))


def check_endpoints() -> None:
    """obstore panics at an endpoint that is not a URL."""
    for name in _ENDPOINTS:
        value = os.environ.get(name)
        if value and not value.startswith(("http://", "https://")):
            raise ConfigError(
                f"{name}={redact(value)!r} is not a URL; write it with https:// or http://"
            )


def check_aws_keys(environ: Mapping[str, str]) -> None:
    """One key without the other is a mistake, which obstore would report as an outage."""
    missing = [name for name in AWS_KEYS if not environ.get(name)]
    if len(missing) == 1:
        (given,) = set(AWS_KEYS) - set(missing)
        raise ConfigError(f"{given} is set and {missing[0]} is not; set both or neither")


def read_aws_profile() -> dict[str, Any]:
    """obstore's settings from AWS's shared files; empty if the environment has the keys.

    A profile without keys (single sign-on, an assumed role) needs boto3, which is used if installed.
    """
    if any(os.environ.get(name) for name in _NAMES["s3"]):
        return {}
    both = read_shared_files()
    region = {"region": both["region"]} if both.get("region") and not _names_region() else {}
    if "aws_access_key_id" in both and "aws_secret_access_key" in both:
        keys = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        return {"config": {name: both[name] for name in keys if both.get(name)} | region}
    if both and (provider := _build_boto3_provider()) is not None:
        return {"config": region, "credential_provider": provider}
    return {}


def read_shared_files() -> Mapping[str, str]:
    """The settings of AWS_PROFILE, or of the default profile; empty without the files."""
    profile = os.environ.get("AWS_PROFILE", "default")
    secrets = _read_section("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile)
    named = profile if profile == "default" else f"profile {profile}"
    return {**_read_section("AWS_CONFIG_FILE", "config", named), **secrets}


def _names_region() -> bool:
    return bool(os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"))


def _read_section(variable: str, name: str, section: str) -> Mapping[str, str]:
    path = Path(os.environ.get(variable) or Path.home() / ".aws" / name).expanduser()
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(path)
    except (OSError, Error):
        return {}
    return dict(parser[section]) if parser.has_section(section) else {}


def _build_boto3_provider() -> Any:
    """None without boto3, and if it finds no credentials in the profile."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    profile = os.environ.get("AWS_PROFILE", "default")
    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=profile))
    except ValueError:  # such as a profile that has a region only
        return None
    except BotoCoreError as error:
        raise ConfigError(
            f"AWS_PROFILE={profile}: {error}; correct the profile, or export AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        ) from None
