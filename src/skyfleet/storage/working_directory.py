"""The working directory, which an environment may change: paths that keep leading to the same place."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from skyfleet.errors import ConfigError

logger = logging.getLogger(__name__)

_warned = False


def find_working_directory() -> str | None:
    """None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def anchor_path(path: str | Path) -> Path:
    """The absolute path; resolve it before an environment runs."""
    if Path(path).is_absolute():
        return Path(path)
    if (directory := find_working_directory()) is None:
        raise ConfigError(
            f"{str(path)!r} is relative, and the working directory was removed; use an absolute path, "
            "or change to a folder that exists"
        )
    return Path(directory, path)


def shorten_path(absolute: Path, given: Path) -> Path:
    """The path as it was given, as long as it leads to `absolute` from the working directory."""
    directory = find_working_directory()
    leads_there = directory is not None and Path(directory, given) == absolute
    return given if leads_there else absolute


def warn_if_changed(before: str | None, env_key: str) -> None:
    """Warn once per process that the working directory is not `before` any more."""
    global _warned
    if _warned or (now := find_working_directory()) == before:
        return
    _warned = True
    logger.warning(
        "the working directory changed from %s to %s while an episode of %s ran; the run still writes "
        "to its own folder, but relative paths in environments and rewards lead elsewhere now: use "
        "absolute paths instead of os.chdir, or environment.isolation=process",
        before or "a removed folder",
        now or "a removed folder",
        env_key,
    )
