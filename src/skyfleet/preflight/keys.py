"""Checks of API keys: each that the configuration needs is set, and its service accepts it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx

from skyfleet.config.root import RunConfig
from skyfleet.config.tracking import list_wandb_keys
from skyfleet.envs.event_loop import run_loop
from skyfleet.envs.fleet.service import FleetService, RunnerToken
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.envs.registry import uses_fleet
from skyfleet.envs.tls import tls_context
from skyfleet.preflight.check import (
    CheckFailedError,
    Subject,
    UnreachableError,
    WarningError,
    check,
)
from skyfleet.redaction import remember_secrets
from skyfleet.storage.objects import has_credentials
from skyfleet.tracking.wandb_tracker import OFFLINE_MODES, WANDB_URL, read_login
from skyfleet.trainer.bucket_layout import read_bucket

_REJECTED = (401, 403)
_REQUEST_SECONDS = 20
_SLACK_URL = "https://slack.com/api/"
_VIEWER = "query Viewer { viewer { id entity username } }"
S3 = "s3://"


@check("FLEET_API_KEY", "keys")
def check_fleet_key(subject: Subject) -> str | None:
    """Ask Fleet for the account of the key."""
    config = subject.config
    if not uses_fleet(config):
        return None
    settings = FleetSettings.from_config(
        config.environment.skyrl_gym.fleet_task,
        trajectory_timeout_seconds=config.generator.trajectory_timeout_seconds,
    )
    answer = run_loop(_request_account(settings))
    if answer.status_code in _REJECTED:
        raise CheckFailedError(
            f"{settings.base_url} rejects FLEET_API_KEY ({answer.status_code}); export a valid key"
        )
    if not answer.is_success:
        raise _judge_status(answer)(
            f"{settings.base_url} answered {answer.status_code} {answer.text[:200]}; check "
            "FLEET_BASE_URL, or try again later"
        )
    return f"accepted by {settings.base_url}"


async def _request_account(settings: FleetSettings) -> httpx.Response:
    service = FleetService(settings, RunnerToken())
    service.open()
    try:
        return await service.send("GET", "/v1/account", seconds=_REQUEST_SECONDS)
    except httpx.TransportError as error:
        raise _unreachable(settings.base_url, error, "FLEET_BASE_URL") from None
    finally:
        await service.close()


@check("WANDB_API_KEY", "keys", is_optional=True)
def check_wandb_key(subject: Subject) -> str | None:
    """Ask W&B whose key it is."""
    environ, config = subject.environ, subject.config
    if "wandb" not in config.trainer.logger or environ.get("WANDB_MODE") in OFFLINE_MODES:
        return None
    url = environ.get("WANDB_BASE_URL") or WANDB_URL
    names = list_wandb_keys(config.trainer.wandb.modality or environ.get("MODALITY"))
    key = next((environ[name] for name in names if environ.get(name)), "") or read_login(url)
    if not key:
        raise CheckFailedError(
            f"trainer.logger has wandb, and {' and '.join(names)} "
            f"{'is' if len(names) == 1 else 'are'} not set; export one, run wandb login, or set "
            "WANDB_MODE=offline"
        )
    remember_secrets([key])
    answer = _post(f"{url.rstrip('/')}/graphql", "WANDB_BASE_URL", {"query": _VIEWER}, ("api", key))
    viewer = (answer.get("data") or {}).get("viewer")
    if not viewer:
        raise CheckFailedError(f"{url} rejects WANDB_API_KEY; export a valid key")
    return f"accepted by {url}, entity {viewer.get('entity')}"


@check("SLACK_BOT_TOKEN", "keys", is_optional=True)
def check_slack_token(subject: Subject) -> str | None:
    """Ask Slack whose token it is."""
    environ = subject.environ
    alerts = subject.config.trainer.alerts
    if not alerts.slack_channel:
        return None
    token = environ.get("SLACK_BOT_TOKEN")
    if not token:
        raise CheckFailedError(
            f"trainer.alerts.slack_channel={alerts.slack_channel!r}, and SLACK_BOT_TOKEN is not set; "
            "export it, or leave the channel out"
        )
    remember_secrets([token])
    url = environ.get("SLACK_API_URL") or _SLACK_URL
    answer = _post(
        f"{url.rstrip('/')}/auth.test",
        "SLACK_API_URL",
        {},
        None,
        {"Authorization": f"Bearer {token}"},
    )
    if not answer.get("ok"):
        raise CheckFailedError(
            f"Slack rejects SLACK_BOT_TOKEN: {answer.get('error')}; export a valid token"
        )
    return f"accepted, team {answer.get('team')}"


def _post(
    url: str,
    variable: str,
    body: Mapping[str, object],
    auth: tuple[str, str] | None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON object of an answer; an empty one if the key is rejected."""
    try:
        answer = httpx.post(
            url,
            json=dict(body),
            auth=auth,
            headers=dict(headers or {}),
            timeout=_REQUEST_SECONDS,
            verify=tls_context(),
        )
    except httpx.TransportError as error:
        raise _unreachable(url, error, variable) from None
    if answer.status_code in _REJECTED:
        return {}
    try:
        found = answer.raise_for_status().json()
    except (httpx.HTTPStatusError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise _judge_status(answer)(
            f"{url} answered {answer.status_code} {answer.text[:200]!r}; check {variable}, or try "
            "again later"
        )
    return found


def _judge_status(answer: httpx.Response) -> type[CheckFailedError]:
    is_temporary = answer.status_code >= 500 or answer.status_code == 429
    return UnreachableError if is_temporary else CheckFailedError


def _unreachable(url: str, error: Exception, variable: str) -> UnreachableError:
    reason = str(error) or type(error).__name__
    return UnreachableError(f"{url} cannot be reached: {reason}; check the network and {variable}")


@check("AWS credentials", "keys")
def check_aws_credentials(subject: Subject) -> str | None:
    """Both keys or neither; whether a bucket accepts them is checked with the bucket."""
    found = next(_find_s3_addresses(subject.config), None)
    if found is None:
        return None
    needed_by, address = found
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    missing = [name for name in names if not subject.environ.get(name)]
    if not missing:
        return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are set"
    if len(missing) == 2 and (_has_other_credentials(subject.environ) or has_credentials(address)):
        return "from a profile, a role or the machine"
    if len(missing) == 2 and needed_by in list_buckets(subject.config):
        raise WarningError(
            f"no AWS credentials: nothing is uploaded to {needed_by}, and everything stays on this "
            "machine; export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to upload"
        )
    raise CheckFailedError(
        f"{needed_by} is in S3, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
        "set; export both, or neither and a profile (AWS_PROFILE)"
    )


def _find_s3_addresses(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The keys of the configuration whose values are in S3, with one of these values."""
    data = config.data
    sources: dict[str, Iterable[str]] = {"data.train_data": data.train_data}
    sources |= {f"data.val_data.{name}": values for name, values in data.eval_sets.items()}
    for key, values in sources.items():
        yield from ((key, value) for value in values if value.startswith(S3))
    for key, address in list_buckets(config).items():
        if address.startswith(S3):
            yield key, address


def list_buckets(config: RunConfig) -> dict[str, str]:
    """The addresses of the run's buckets by key."""
    trainer = config.trainer
    values = {
        "trainer.ckpt_bucket": trainer.ckpt_bucket,
        "trainer.trajectory_bucket": trainer.trajectory_bucket,
    }
    return {key: read_bucket(value) for key, value in values.items() if value is not None}


def _has_other_credentials(environ: Mapping[str, str]) -> bool:
    names = ("AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    files = (
        environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
    )
    return any(environ.get(name) for name in names) or any(
        os.path.isfile(os.path.expanduser(path)) for path in files
    )
