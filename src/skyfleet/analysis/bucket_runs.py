"""Runs in buckets: copy what a command reads to a cache folder, and only what has changed.

An address is a run folder (`{bucket}/runs/{run}`), the checkpoints of a run
(`{bucket}/{project}/{model}/{run}`, whose records are below `run`), or SkyRL's dumps
(`{bucket}/evals/{run}` or one `global_step_N` of them).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from skyfleet.analysis.dump_import import import_dumps
from skyfleet.errors import ConfigError
from skyfleet.storage.bucket_lock import OWNER
from skyfleet.storage.cache import find_cache_folder
from skyfleet.storage.local import make_folder, write_atomically
from skyfleet.storage.objects import ObjectInfo, join, list_objects
from skyfleet.storage.transfer import download_file

_CONFIG, _DUMPS, _VERSIONS = "config.yaml", "dumps", "versions.json"
_STEP_FOLDER = re.compile(r"global_step_\d+(_evals)?")
_IN_STEP_FOLDER = re.compile(rf"{_STEP_FOLDER.pattern}/")
_AT_ONCE = 8


def fetch_run(address: str) -> Path:
    """The run folder, up to date, in the cache of this machine."""
    address = address.rstrip("/")
    cache, name = find_cache_folder("runs", address), address.rpartition("/")[2]
    found = {info.name: info for info in list_objects(address)}
    if f"run/{_CONFIG}" in found and _CONFIG not in found:
        # Of a run's checkpoints, the records only.
        return fetch_run(join(address, "run"))
    if _CONFIG in found:
        # A process that uploads replaces and removes the record of its lock at any moment.
        wanted = [
            info
            for name, info in found.items()
            if not name.startswith("checkpoints/") and name != OWNER
        ]
        folder = cache / _choose_name(address)
        _copy_changed(address, folder, wanted, cache / _VERSIONS)
        return folder
    dumps = [info for info in found.values() if info.name.endswith(".jsonl")]
    is_step = _STEP_FOLDER.fullmatch(name) is not None
    if not dumps or not (is_step or any(map(_IN_STEP_FOLDER.match, found))):
        raise ConfigError(
            f"{address} is not a run: it has neither {_CONFIG} nor global_step_N folders with "
            "dumps; pass s3://bucket/runs/<run_name> or s3://bucket/evals/<run_name>"
        )
    run, copies = cache / _choose_name(address), cache / _DUMPS
    place = copies / name if is_step else copies
    if _copy_changed(address, place, dumps, cache / _VERSIONS) or not run.exists():
        shutil.rmtree(run, ignore_errors=True)
        import_dumps(copies, run)
    return run


def _choose_name(address: str) -> str:
    """The run's name: the last part that is not a layout's own."""
    parts = [part for part in address.split("/")[2:] if part]
    while len(parts) > 1 and (parts[-1] == "run" or _STEP_FOLDER.fullmatch(parts[-1])):
        parts.pop()
    return parts[-1]


def _copy_changed(
    address: str, folder: Path, wanted: Sequence[ObjectInfo], versions_path: Path
) -> bool:
    """Make the folder equal to the objects; whether anything had changed."""
    known: Mapping[str, str] = {}
    if versions_path.exists():
        known = json.loads(versions_path.read_text())
    versions = {info.name: info.version for info in wanted}
    changed = [
        name
        for name, version in versions.items()
        if known.get(name) != version or not _find_inside(folder, name).is_file()
    ]
    make_folder(folder)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda name: _copy(join(address, name), _find_inside(folder, name)), changed))
    removed = [name for name in known if name not in versions]
    for name in removed:
        _find_inside(folder, name).unlink(missing_ok=True)
    write_atomically(versions_path, json.dumps(versions))
    return bool(changed or removed)


def _copy(address: str, path: Path) -> None:
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.draft")
    download_file(address, draft)
    draft.replace(path)


def _find_inside(folder: Path, name: str) -> Path:
    """Names come from a listing, and must not leave the folder."""
    path = folder / name
    if ".." in path.parts or Path(name).is_absolute():
        raise ConfigError(f"{name!r} is not the name of a file in a run")
    return path
