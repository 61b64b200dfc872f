"""Secrets of a task: which names a run needs, and their values from this process's environment.

Task files hold names only. Values travel to SkyPilot as its `secrets`, which it does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from skyfleet.config.keys import dump_yaml
from skyfleet.config.root import RunConfig
from skyfleet.config.tracking import list_wandb_keys
from skyfleet.envs.registry import uses_fleet
from skyfleet.errors import ConfigError
from skyfleet.redaction import MARK
from skyfleet.storage.credentials import check_aws_keys

OPTIONAL_SECRETS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("SLACK_BOT_TOKEN", "HF_TOKEN"),
)
"""Sent if they are set here: buckets, the Slack thread, gated models."""
_MACHINE_VARIABLES = frozenset({"HOME", "USER", "PWD", "PATH", "TMPDIR", "HOSTNAME", "SHELL"})
"""Every machine has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretNames:
    required: tuple[str, ...]
    optional: tuple[str, ...]


def find_secret_names(config: RunConfig, *, wandb: bool) -> SecretNames:
    """What the environments, the tracker and `${oc.env:NAME}` of the configuration read."""
    required = [name for name in config.variables if name not in _MACHINE_VARIABLES]
    if uses_fleet(config):
        required.append("FLEET_API_KEY")
    if wandb:
        required.append("WANDB_API_KEY")
    names = tuple(dict.fromkeys(required))
    optional = tuple(name for name in OPTIONAL_SECRETS if name not in names)
    return SecretNames(required=names, optional=optional)


def reject_literal_secrets(config: RunConfig) -> None:
    """A task file is kept and shown, so a configuration that goes into it names its secrets."""
    for key, value in _leaves(yaml.safe_load(dump_yaml(config)), ""):
        if MARK.search(value):
            raise ConfigError(
                f"{key} holds a secret, which would be written to the task file; "
                f"set it to ${{oc.env:NAME}} and export NAME"
            )


def read_secrets(names: SecretNames, modality: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The values by name; all missing ones are named at once."""
    values = {
        name: environ[name] for name in (*names.required, *names.optional) if environ.get(name)
    }
    keys = list_wandb_keys(modality)
    if "WANDB_API_KEY" in names.required:
        key = next((key for key in keys if environ.get(key)), None)
        values |= {"WANDB_API_KEY": environ[key]} if key else {}
    if missing := [name for name in names.required if name not in values]:
        hint = f" (or {keys[0]}, or --no-wandb)" if "WANDB_API_KEY" in missing else ""
        is_or_are = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{', '.join(missing)} {is_or_are} not set here and the run needs "
            f"{'it' if len(missing) == 1 else 'them'}; export the value{hint}"
        )
    check_aws_keys(values)
    return values


def _leaves(value: object, key: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        items = [(f"{key}.{name}".lstrip("."), item) for name, item in value.items()]
    elif isinstance(value, list):
        items = [(key, item) for item in value]
    else:
        return [(key, str(value))]
    return [leaf for name, item in items for leaf in _leaves(item, name)]
