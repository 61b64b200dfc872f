"""Check that a run trains only on prepared, non-quarantined training tasks."""

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
    """Raise ConfigError for a file without a manifest, a validation task or a quarantined task.

    A source that is not a file needs no manifest: its address determines its tasks.
    """
    for source in filter(is_file, sources):
        manifest = _find_manifest(source) if allow_unmanifested else _require_manifest(source)
        if manifest is not None:
            _check_sides(tasks, source, manifest)
    quarantined = [task for task in tasks if task in quarantine] if quarantine else []
    if quarantine and quarantined:
        where = f" ({', '.join(quarantine.files)})" if quarantine.files else ""
        raise ConfigError(
            f"data.train_data contains {len(quarantined)} tasks in quarantine{where}, such as "
            f"{quarantined[0].key!r} ({quarantine.reason_for(quarantined[0])}); drop them with "
            "`skyfleet tasks prepare --quarantine`, or set data.allow_quarantined=true"
        )


def _check_sides(tasks: Collection[Task], source: str, manifest: Manifest) -> None:
    """Compare by key, whichever file a task is from: no validation task may be trained on."""
    sides = {key: entry.side for key, entry in manifest.tasks.items()}
    held_out = [task.key for task in tasks if sides.get(task.key, "train") != "train"]
    if held_out:
        raise ConfigError(
            f"data.train_data contains {len(held_out)} tasks, such as {held_out[0]!r}, that the "
            f"{MANIFEST} beside {source!r} lists on the {sides[held_out[0]]} side; set the file of "
            "its train side, or split again with `skyfleet tasks prepare`"
        )


def _find_manifest(source: str) -> Manifest | None:
    """Return the manifest that lists the file; allow_unmanifested applies only to unlisted files."""
    try:
        manifest = read_manifest(beside(source, MANIFEST))
    except (FileNotFoundError, TaskError):
        return None
    return manifest if _file_name(source) in manifest.files else None


def _require_manifest(source: str) -> Manifest:
    remedy = (
        f"write one with `skyfleet tasks prepare --tasks-json {source}` and train on what it "
        "writes, or set data.allow_unmanifested=true"
    )
    try:
        manifest = read_manifest(beside(source, MANIFEST))
    except FileNotFoundError:
        raise ConfigError(
            f"data.train_data={source!r} has no {MANIFEST} beside it; {remedy}"
        ) from None
    name = _file_name(source)
    if name not in manifest.files:
        raise ConfigError(
            f"data.train_data={source!r} is not in the {MANIFEST} beside it, which lists "
            f"{sorted(manifest.files)}; {remedy}"
        )
    if sha256_of(read_bytes(source)) != manifest.files[name]:
        raise ConfigError(
            f"data.train_data={source!r} has changed since its {MANIFEST} was written; {remedy}"
        )
    return manifest


def _file_name(source: str) -> str:
    return source.rpartition("/")[2]
