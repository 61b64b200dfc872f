"""Checks of a task's variables: what would otherwise end the run after its machine is paid for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from skyfleet.errors import ConfigError
from skyfleet.launch.resources import CLOUDS
from skyfleet.storage.objects import is_address
from skyfleet.tracking.tracker import PACKAGES

Check = Callable[[str, Path], bool]
"""Whether a value, which is not empty, is one; the folder is the clone."""

TASK_SUFFIXES = (".json", ".jsonl", ".parquet")


def check_variables(envs: Mapping[str, str | None], root: Path) -> None:
    """Raise one ConfigError that names every variable with a wrong value."""
    problems = []
    for name, (is_valid, remedy) in _CHECKS.items():
        value = envs.get(name) or ""
        if value and not is_valid(value, root):
            problems.append(f"{name}={value!r} is wrong; use {remedy}")
    if envs.get("DATASET") and not (envs.get("TASKS_JSON") or envs.get("DATA_VERSION")):
        problems.append("DATA_VERSION is empty; write a version of the dataset, such as v0.2")
    if problems:
        raise ConfigError("\n".join(problems))


def list_extra_names(root: Path) -> set[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


def _choose(*values: str) -> tuple[Check, str]:
    return lambda value, _: value in values, " or ".join(values)


def _is_number(value: str, *, low: float, high: float) -> bool:
    try:
        return low <= float(value) <= high
    except ValueError:
        return False


def _is_url(value: str, _: Path) -> bool:
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _is_bucket(value: str, _: Path) -> bool:
    if is_address(value):
        return bool(value.partition("://")[2])
    is_path = value.startswith(("/", ".", "~"))
    return is_path or re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", value) is not None


def _is_task_source(value: str, root: Path) -> bool:
    found = is_address(value) or (root / value).is_file()
    return found and value.endswith(TASK_SUFFIXES)


def _is_rate(value: str) -> bool:
    cloud, _, rate = value.partition("=")
    return cloud in CLOUDS and _is_number(rate, low=0, high=1e6)


def _split(value: str) -> list[str]:
    return [name.strip() for name in value.split(",")]


_URL = (_is_url, "an address such as https://example.com")
_BUCKET = (_is_bucket, "the name of a bucket in S3, or s3://, gs:// or az:// before it")
_CHECKS: Mapping[str, tuple[Check, str]] = {
    "MODALITY": _choose("tool_use", "computer_use", "both"),
    "DATASET": _choose("fleet", "''"),
    "DATA_VERSION": (
        lambda value, _: re.fullmatch(r"[\w.+-]+", value) is not None,
        "a version of the dataset, such as v0.2",
    ),
    "TASKS_JSON": (
        _is_task_source,
        f"an address or a file in the clone that ends with {', '.join(TASK_SUFFIXES)}",
    ),
    "DIFFICULTY": (
        lambda value, _: value == "all" or all(part.isdecimal() for part in _split(value)),
        "all, or numbers such as 1,2",
    ),
    "MAX_TASKS": (lambda value, _: value.isdecimal() and int(value) > 0, "a number from 1 on"),
    "EVAL_RATIO": (lambda value, _: _is_number(value, low=0, high=1), "a number from 0 to 1"),
    "MAX_RESTARTS": (lambda value, _: value.isdecimal(), "a number from 0 on"),
    "PREFLIGHT": _choose("1", "0"),
    "DISABLE_SLACK": _choose("true", "false"),
    "LOGGER": (
        lambda value, _: set(_split(value)) <= PACKAGES.keys(),
        f"some of {','.join(PACKAGES)}",
    ),
    "EXTRAS": (
        lambda value, root: set(_split(value)) <= list_extra_names(root),
        "extras of pyproject.toml, such as train,s3,wandb",
    ),
    "CONSTRAINTS": (lambda value, root: (root / value).is_file(), "a file in the clone"),
    **dict.fromkeys(
        (
            *("AWS_ENDPOINT_URL", "FLEET_BASE_URL", "WANDB_BASE_URL", "HF_ENDPOINT"),
            "OPENENV_REPOSITORY",
        ),
        _URL,
    ),
    **dict.fromkeys(("S3_DATASET_BUCKET", "S3_CHECKPOINT_BUCKET", "S3_TRAJECTORY_BUCKET"), _BUCKET),
    "DOLLARS_PER_HOUR": (
        lambda value, _: all(map(_is_rate, _split(value))),
        "cloud=number, such as lambda=2.99,runpod=3.59",
    ),
}
"""By variable: whether a value is valid, and what is."""
