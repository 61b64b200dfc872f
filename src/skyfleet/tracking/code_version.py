"""CodeVersion: which skyfleet and which commit of the user's repository a run executes."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

COMMIT_VARIABLE = "GIT_COMMIT"
"""What `skyfleet launch` copied, where the code arrives without its repository: `{sha}[-dirty]`."""
_PACKAGES = ("torch", "transformers", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVersion:
    skyfleet: str
    python: str
    commit: str | None
    """Of the repository of the current folder; None outside a repository."""
    is_modified: bool
    """Whether tracked files differ from the commit."""
    packages: Mapping[str, str]

    def flatten(self) -> dict[str, object]:
        """`{"code/commit": ..., "code/torch": ...}`, as entries of a tracker's configuration."""
        values = asdict(self)
        return {f"code/{name}": value for name, value in (values | values.pop("packages")).items()}


def find_code_version(folder: Path = Path()) -> CodeVersion:
    if commit := _run_git(folder, "rev-parse", "HEAD"):
        is_modified = bool(_run_git(folder, "status", "--porcelain", "--untracked-files=no"))
    else:
        given = os.environ.get(COMMIT_VARIABLE, "")
        commit, is_modified = given.removesuffix("-dirty") or None, given.endswith("-dirty")
    packages = {name: found for name in _PACKAGES if (found := _find_version(name))}
    return CodeVersion(
        skyfleet=_find_version("skyfleet") or "unknown",
        python=platform.python_version(),
        commit=commit,
        is_modified=is_modified,
        packages=packages,
    )


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
