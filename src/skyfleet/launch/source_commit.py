"""The commit that launches a run: SkyPilot copies this clone, and the run records its commit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from skyfleet.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCommit:
    root: Path
    sha: str
    dirty: bool
    """Whether tracked files differ from the commit, or files that git does not ignore were added."""

    def __str__(self) -> str:
        return f"{self.sha}-dirty" if self.dirty else self.sha


def find_commit(folder: Path) -> SourceCommit:
    """The commit of the clone that holds `folder`; it must be a clone of skyfleet."""
    root = Path(_run_git(folder, "rev-parse", "--show-toplevel"))
    if not (root / "src" / "skyfleet" / "launch" / "scripts" / "run.sh").is_file():
        raise ConfigError(f"{root} is not a clone of skyfleet; run skyfleet launch inside one")
    return SourceCommit(
        root=root,
        sha=_run_git(root, "rev-parse", "HEAD"),
        dirty=bool(_run_git(root, "status", "--porcelain")),
    )


def _run_git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ConfigError("skyfleet launch needs git, to name the commit that it sends") from None
    if done.returncode:
        raise ConfigError(
            f"{folder} is not in a git repository; run skyfleet launch inside a clone of skyfleet"
        )
    return done.stdout.strip()
