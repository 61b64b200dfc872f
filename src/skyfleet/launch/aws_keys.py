"""AWS keys of the machine that launches: from its variables, shared files or single sign-on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyfleet.errors import ConfigError
from skyfleet.storage.credentials import check_aws_keys, hide_empty_variables, read_shared_files

_NAMES = {
    "AWS_ACCESS_KEY_ID": "aws_access_key_id",
    "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key",
    "AWS_SESSION_TOKEN": "aws_session_token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsKeys:
    secrets: dict[str, str]
    """By variable, as a launched machine gets them."""
    source: str
    region: str = ""
    """Of the profile; empty if it names none."""
    expires: str = ""
    """Of a session; empty if it is unknown."""

    def describe(self) -> tuple[str, ...]:
        """Where they come from, and that keys of a session end before a long run does."""
        notes = () if self.source == "variables" else (f"AWS keys: from {self.source}",)
        if "AWS_SESSION_TOKEN" not in self.secrets:
            return notes
        when = f"at {self.expires}" if self.expires else "within hours (nothing here says when)"
        return (
            *notes,
            f"the AWS keys are those of a session, which expires {when}: a run that is longer can "
            "no longer upload; for a run of days use keys of a user",
        )


def find_aws_keys() -> AwsKeys | None:
    """By the standard chain: variables, shared files, then what botocore finds, if it is installed."""
    check_aws_keys(os.environ)
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        secrets = {name: os.environ[name] for name in _NAMES if os.environ.get(name)}
        expires = os.environ.get("AWS_CREDENTIAL_EXPIRATION", "")
        return AwsKeys(secrets=secrets, source="variables", expires=expires)
    with hide_empty_variables():
        settings = read_shared_files()
        profile = os.environ.get("AWS_PROFILE", "default")
        if "aws_access_key_id" in settings and "aws_secret_access_key" in settings:
            return AwsKeys(
                secrets={name: settings[key] for name, key in _NAMES.items() if settings.get(key)},
                source=f"profile {profile}",
                region=settings.get("region", ""),
            )
        return _ask_botocore(profile)


FORWARDED = ("AWS_REGION", "AWS_ENDPOINT_URL", "FLEET_BASE_URL", "WANDB_BASE_URL", "HF_ENDPOINT")
"""Variables of this environment that a launched machine gets too."""


def read_forwarded(environ: Mapping[str, str], keys: AwsKeys | None) -> dict[str, str]:
    """What this environment says of where services are; the region may be that of the profile."""
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    region = region or (keys.region if keys else "")
    found = {name: environ.get(name) or "" for name in FORWARDED} | {"AWS_REGION": region}
    return {name: value for name, value in found.items() if value}


def _ask_botocore(profile: str) -> AwsKeys | None:
    """Single sign-on, assumed roles, a process or a web identity; no metadata service is asked."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.session import Session
    except ImportError:
        return None
    session: Any = Session(profile=os.environ.get("AWS_PROFILE"))
    try:
        # The role of the machine that launches is not one for another machine.
        session.get_component("credential_provider").remove("iam-role")
        found = session.get_credentials()
        frozen = found and found.get_frozen_credentials()
        region = session.get_config_variable("region") or ""
    except (BotoCoreError, ClientError) as error:
        raise ConfigError(
            f"AWS_PROFILE={profile}: {error}; log in (aws sso login), or export AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY"
        ) from None
    if not frozen or not frozen.access_key:
        return None
    values = (frozen.access_key, frozen.secret_key, frozen.token)
    expires = getattr(found, "_expiry_time", None)
    return AwsKeys(
        secrets={name: value for name, value in zip(_NAMES, values, strict=True) if value},
        source=f"profile {profile} ({found.method})",
        region=region,
        expires=f"{expires:%Y-%m-%d %H:%M} UTC" if expires else "",
    )
