"""Checks of a launch: names, secrets, and data that the machine could not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyfleet.config.root import RunConfig
from skyfleet.envs.registry import uses_fleet
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.redaction import redact, redact_value
from skyfleet.storage.objects import is_address, stat_object
from skyfleet.tasks.raw_rows import PLACE

PREPARED = "data/fleet/"
"""Where the task's set-up writes the dataset."""


def reject_run_name(overrides: Sequence[str]) -> None:
    """The machine, the checkpoints, W&B and Slack have one name."""
    for override in overrides:
        if override.lstrip("+").startswith("trainer.run_name="):
            raise ConfigError(f"{override}: the machine has the run's name too; use --run-name")


def reject_secret_values(envs: Mapping[str, str | None]) -> None:
    """The variables are written to the task file, which is kept and shown."""
    for name, value in envs.items():
        lines = (value or "").splitlines()
        if any(redact(line) != line for line in lines) or redact_value(lines) != lines:
            raise ConfigError(
                f"--env {name} holds a secret, which would be written to the task file; export it, and "
                "name it in the configuration as ${oc.env:NAME}"
            )


def find_modality(config: RunConfig) -> str:
    sources = " ".join(config.data.train_data)
    found = [name for name in ("tool_use", "computer_use") if f"{PREPARED}{name}/" in sources]
    return "both" if len(found) == 2 else found[0] if found else "tool_use"


def reads_prepared(config: RunConfig) -> bool:
    return uses_fleet(config) and any(
        source.startswith(PREPARED) for source in config.data.train_data
    )


def locate_dataset(envs: Mapping[str, str | None], config: RunConfig) -> tuple[str, ...]:
    """The addresses in buckets that set-up or the run reads; none if the data is in the clone."""
    if envs.get("DATASET") != "fleet":
        data = config.data
        named = [*data.train_data, *(one for found in data.eval_sets.values() for one in found)]
        return tuple(dict.fromkeys(source for source in named if is_address(source)))
    source = envs.get("TASKS_JSON") or (
        f"s3://{envs['S3_DATASET_BUCKET']}/{envs['DATA_VERSION']}/openenv/all_{PLACE}.json"
    )
    if not is_address(source):
        return ()
    modality = envs["MODALITY"] or ""
    names = ("tool_use", "computer_use") if modality == "both" else (modality,)
    return tuple(dict.fromkeys(source.replace(PLACE, name) for name in names))


def refuse_unreadable(dataset: Sequence[str]) -> tuple[str, ...]:
    """What a machine without AWS keys could not read in its set-up."""
    return tuple(
        f"the dataset is {address}, and there are no AWS keys here; export AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, set AWS_PROFILE, or name a file of the clone with --env TASKS_JSON=FILE"
        for address in [one for one in dataset if one.startswith("s3://")][:1]
    )


def check_dataset(dataset: Sequence[str]) -> str:
    """Say whether the dataset can be read from here; ConfigError if there is none, or it is refused."""
    for address in dataset:
        try:
            stat_object(address)
        except (FileNotFoundError, PermissionError) as error:
            raise ConfigError(
                f"{address}: {error.strerror}; correct DATA_VERSION, S3_DATASET_BUCKET or TASKS_JSON "
                "(--env), the configuration, or the AWS keys"
            ) from None
        except (OSError, MissingExtraError) as error:
            return f"not checked whether {address} can be read: {error}"
    return f"the dataset is {' and '.join(dataset)}"
