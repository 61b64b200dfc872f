"""Allowed: a run trains on checked data, or says that it does not want to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skyfleet.curation.quarantine import Quarantine
from skyfleet.errors import ConfigError
from skyfleet.storage.store import beside, read_bytes
from skyfleet.tasks.manifest import MANIFEST, read_manifest, sha256_of
from skyfleet.tasks.task import Task


def check_allowed(
    tasks: Iterable[Task],
    sources: Sequence[str],
    *,
    allow_unmanifested: bool,
    quarantine: Quarantine | None,
) -> None:
    """ConfigError for a file that no manifest vouches for, and for a task in quarantine.

    A `world:` or `agentdojo:` source needs no manifest: its address says which tasks it makes.
    """
    if not allow_unmanifested:
        for source in sources:
            if not source.startswith(("world:", "agentdojo:")):
                _check_manifest(source)
    caught = [task for task in tasks if task in quarantine] if quarantine else []
    if quarantine and caught:
        raise ConfigError(
            f"data.train_data holds {len(caught)} tasks in quarantine, such as {caught[0].key!r} "
            f"({quarantine.reason_for(caught[0])}); leave them out with `skyfleet tasks prepare "
            "--quarantine`, or set data.allow_quarantined=true"
        )


def _check_manifest(source: str) -> None:
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
    name = source.rpartition("/")[2]
    if name not in manifest.files:
        raise ConfigError(
            f"data.train_data={source!r} is not in the {MANIFEST} beside it, which knows "
            f"{sorted(manifest.files)}; {way_out}"
        )
    if sha256_of(read_bytes(source)) != manifest.files[name]:
        raise ConfigError(
            f"data.train_data={source!r} has changed since its {MANIFEST} was written; {way_out}"
        )
