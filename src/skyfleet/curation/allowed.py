"""Allowed: a run trains on checked data, or says that it does not want to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from skyfleet.curation.quarantine import Quarantine, is_file
from skyfleet.errors import ConfigError, TaskError
from skyfleet.storage.store import beside, read_bytes
from skyfleet.tasks.manifest import MANIFEST, Manifest, read_manifest, sha256_of
from skyfleet.tasks.task import Task


def check_allowed(
    tasks: Collection[Task],
    sources: Sequence[str],
    *,
    allow_unmanifested: bool,
    quarantine: Quarantine | None,
) -> None:
    """ConfigError for a file that no manifest vouches for, and for a task to measure with or in
    quarantine.

    A source that is no file needs no manifest: its address says which tasks it makes.
    """
    for source in filter(is_file, sources):
        manifest = _known_manifest(source) if allow_unmanifested else _checked_manifest(source)
        if manifest is not None:
            _check_sides(tasks, source, manifest)
    caught = [task for task in tasks if task in quarantine] if quarantine else []
    if quarantine and caught:
        where = f" ({', '.join(quarantine.files)})" if quarantine.files else ""
        raise ConfigError(
            f"data.train_data holds {len(caught)} tasks in quarantine{where}, such as "
            f"{caught[0].key!r} ({quarantine.reason_for(caught[0])}); leave them out with "
            "`skyfleet tasks prepare --quarantine`, or set data.allow_quarantined=true"
        )


def _check_sides(tasks: Collection[Task], source: str, manifest: Manifest) -> None:
    """By the key, wherever a task was read: what one file measures with, none may train on."""
    sides = {key: entry.side for key, entry in manifest.tasks.items()}
    caught = [task.key for task in tasks if sides.get(task.key, "train") != "train"]
    if caught:
        raise ConfigError(
            f"data.train_data holds {len(caught)} tasks, such as {caught[0]!r}, that the "
            f"{MANIFEST} beside {source!r} has on the {sides[caught[0]]} side; name the file of "
            "its train side, or split anew with `skyfleet tasks prepare`"
        )


def _known_manifest(source: str) -> Manifest | None:
    """The one that lists the file, if there is one: the leave is for files that none lists."""
    try:
        manifest = read_manifest(beside(source, MANIFEST))
    except (FileNotFoundError, TaskError):
        return None
    return manifest if _name(source) in manifest.files else None


def _checked_manifest(source: str) -> Manifest:
    way_out = (
        f"write one with `skyfleet tasks prepare --tasks-json {source}` and train on what it "
        "writes, or set data.allow_unmanifested=true"
    )
    try:
        manifest = read_manifest(beside(source, MANIFEST))
    except FileNotFoundError:
        raise ConfigError(
            f"data.train_data={source!r} has no {MANIFEST} beside it; {way_out}"
        ) from None
    name = _name(source)
    if name not in manifest.files:
        raise ConfigError(
            f"data.train_data={source!r} is not in the {MANIFEST} beside it, which knows "
            f"{sorted(manifest.files)}; {way_out}"
        )
    if sha256_of(read_bytes(source)) != manifest.files[name]:
        raise ConfigError(
            f"data.train_data={source!r} has changed since its {MANIFEST} was written; {way_out}"
        )
    return manifest


def _name(source: str) -> str:
    return source.rpartition("/")[2]
