"""A run records the commit that it executes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from skyfleet.tracking.code_version import COMMIT_VARIABLE, find_code_version


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_the_commit_and_whether_files_differ_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "env.py").write_text("a = 1\n")
    git(tmp_path, "add", "env.py")
    git(tmp_path, "commit", "-q", "-m", "Add env")
    (tmp_path / "notes.txt").write_text("not tracked")
    clean = find_code_version(tmp_path)
    assert (clean.commit, clean.is_modified) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "env.py").write_text("a = 2\n")
    assert find_code_version(tmp_path).is_modified
    values = clean.flatten()
    assert values["code/commit"] == clean.commit
    assert values["code/skyfleet"] == clean.skyfleet
    assert "code/packages" not in values


def test_outside_a_repository_the_launcher_names_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    assert find_code_version(tmp_path).commit is None
    for given, is_modified in (("0123abcd", False), ("0123abcd-dirty", True)):
        monkeypatch.setenv(COMMIT_VARIABLE, given)
        found = find_code_version(tmp_path)
        assert (found.commit, found.is_modified) == ("0123abcd", is_modified)
