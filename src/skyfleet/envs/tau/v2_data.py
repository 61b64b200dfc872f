"""tau2's data folder: `TAU2_DATA_DIR`, completed from PyPI's inspect-evals where files are missing.

Mirrors of the repository may leave out its two large files; inspect-evals carries all of them, some
compressed and policies as .txt.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from skyfleet.errors import ConfigError

_kept: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""

_REQUIRED = {
    "airline": ("db.json", "policy.md", "tasks.json", "split_tasks.json"),
    "retail": ("db.json", "policy.md", "tasks.json", "split_tasks.json"),
    "telecom": ("db.toml", "user_db.toml", "main_policy.md", "tasks.json", "split_tasks.json"),
    "mock": ("db.json", "user_db.json", "policy.md", "tasks.json", "split_tasks.json"),
}
"""By domain."""


@cache
def find_data_folder(checkout: Path) -> Path:
    """Return a folder with every domain that can be had: the given one, or a completed copy."""
    given = _find_given_folder(checkout)
    missing = {
        place: source
        for place, source in _list_inspect_evals()
        if not (given / "tau2" / "domains" / place).is_file()
    }
    if not missing:
        return given
    folder = tempfile.TemporaryDirectory(prefix="skyfleet-tau2-")
    _kept.append(folder)
    completed = Path(folder.name)
    _link_files(given / "tau2", completed / "tau2")
    for place, source in missing.items():
        target = completed / "tau2" / "domains" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        data = source.read_bytes()
        target.write_bytes(gzip.decompress(data) if source.suffix == ".gz" else data)
    return completed


def check_data(domain: str, folder: Path) -> None:
    """ConfigError if the folder lacks a file of the domain."""
    place = folder / "tau2" / "domains" / domain
    for name in _REQUIRED[domain]:
        if not (place / name).is_file():
            raise ConfigError(
                f"tau2's {domain} has no {name} in TAU2_DATA_DIR={os.environ.get('TAU2_DATA_DIR', '')}"
                "; set it to the data folder of a complete checkout, or pip install --no-deps "
                "inspect-evals, which carries the file"
            )


def _find_given_folder(checkout: Path) -> Path:
    value = os.environ.get("TAU2_DATA_DIR")
    folder = Path(value).expanduser().absolute() if value else checkout / "data"
    if value and not (folder / "tau2" / "domains").is_dir() and not dict(_list_inspect_evals()):
        raise ConfigError(
            f"TAU2_DATA_DIR={value} holds no tau2/domains; set it to the data folder of a checkout of "
            "sierra-research/tau2-bench"
        )
    return folder


def _list_inspect_evals() -> Iterator[tuple[str, Path]]:
    """The data files of an installed inspect-evals by their names in tau2; imports nothing."""
    spec = find_spec("inspect_evals")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        domains = Path(location) / "tau2" / "data" / "domains"
        for file in sorted(domains.rglob("*")):
            if file.is_file():
                place = file.relative_to(domains).as_posix().removesuffix(".gz")
                yield place.replace(".txt", ".md"), file


def _link_files(source: Path, target: Path) -> None:
    """Copy the tree as links."""
    if not source.is_dir():
        return
    shutil.copytree(source, target, copy_function=os.symlink, dirs_exist_ok=True)
