"""DeltaReceiver: follows a chain of weight deltas, and starts at a full snapshot where it must."""

from __future__ import annotations

import time
from collections.abc import Iterator
from time import perf_counter

import torch
from safetensors import safe_open
from torch import Tensor

from skyfleet.errors import ModelError
from skyfleet.models.weights import weight_checksum
from skyfleet.weight_transfer.buckets import TransferReport
from skyfleet.weight_transfer.delta_folder import DamagedVersionError, DeltaFolder
from skyfleet.weight_transfer.delta_format import Manifest, as_bits, decompress

_POLL_SECONDS = 0.2


class DeltaReceiver:
    """Holds a version of the weights on the host, and makes a newer one of it.

    Fetching does not need the engine, which may go on; only loading does.
    """

    def __init__(self, sync_dir: str, *, timeout_seconds: float = 300.0) -> None:
        self.sync_dir, self._timeout_seconds = sync_dir, timeout_seconds
        self._folder = DeltaFolder(sync_dir)
        self._weights: dict[str, Tensor] = {}
        self._aliases: dict[str, str] = {}
        self._chain, self.version = "", -1

    def fetch(self, version: int | None = None) -> TransferReport:
        """Reach `version`, or the newest one there is; every weight is then verified.

        Waits for a version that is not there yet. ModelError if none of the ways to it is intact.
        """
        start, deadline = perf_counter(), time.monotonic() + self._timeout_seconds
        while True:
            try:
                path = self._find_path(version)
                for manifest in path or []:
                    self._apply(manifest)
                if path is not None:
                    break
                problem = "no snapshot and no chain of deltas leads to it"
            except DamagedVersionError as error:  # or it was removed while it was read
                self._forget()
                problem = str(error)
            if time.monotonic() > deadline:
                raise self._explain(version, problem)
            time.sleep(_POLL_SECONDS)
        return TransferReport(
            n_bytes=_count_bytes(path),
            seconds=perf_counter() - start,
            n_transfers=sum(len(manifest.files) for manifest in path),
        )

    def named_weights(self, *, with_aliases: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The held version; a loader that ties weights itself needs no aliases."""
        yield from self._weights.items()
        if with_aliases:
            for name, source in self._aliases.items():
                yield name, self._weights[source]

    def _find_path(self, version: int | None) -> list[Manifest] | None:
        """The manifests to apply, in order; None if there is no way (yet).

        Goes back from the wanted version, to the held one or to the nearest snapshot: the way with
        fewer bytes.
        """
        if version is None:
            if not (listed := self._folder.list_versions()):
                return None
            version = listed[-1][1]
        path: list[Manifest] = []
        from_snapshot: list[Manifest] | None = None
        wanted: int | None = version
        while wanted is not None:
            delta = self._folder.read_manifest("delta", wanted)
            snapshot = self._folder.read_manifest("full", wanted)
            known = path[0] if path else delta or snapshot
            if wanted == self.version and known is not None and known.chain == self._chain:
                return min([path, from_snapshot or path], key=_count_bytes)
            if snapshot is not None and from_snapshot is None:
                from_snapshot = [snapshot, *path]
                if self._chain != snapshot.chain or self.version > wanted:
                    break  # the held version is not on the way
            if delta is None:
                break
            path.insert(0, delta)
            wanted = delta.base_version
        return from_snapshot

    @torch.no_grad()
    def _apply(self, manifest: Manifest) -> None:
        """All files are verified and unpacked before a weight changes."""
        if manifest.kind == "full":
            self._forget()
        changes: dict[str, Tensor] = {}
        for index, record in enumerate(manifest.files):
            names = [name for name, weight in manifest.weights.items() if weight.file == index]
            with (
                self._folder.open_file(manifest, record) as path,
                safe_open(path, framework="pt") as file,
            ):
                for name in names:
                    try:
                        held = as_bits(self._held(name, manifest))
                        changes[name] = decompress(file.get_tensor(name), held)
                    except ValueError as error:
                        raise DamagedVersionError(f"{record.name}: {error}") from error
        for name, change in changes.items():
            as_bits(self._weights[name]).bitwise_xor_(change)
        self._aliases = {
            name: weight.same_as
            for name, weight in manifest.weights.items()
            if weight.same_as is not None
        }
        self._weights = {
            name: weight for name, weight in self._weights.items() if name not in self._aliases
        }
        self._verify(manifest)
        self._chain, self.version = manifest.chain, manifest.version

    def _held(self, name: str, manifest: Manifest) -> Tensor:
        if name not in self._weights:
            record = manifest.weights[name]
            dtype: torch.dtype = getattr(torch, record.dtype)
            self._weights[name] = torch.zeros(record.shape, dtype=dtype)
        return self._weights[name]

    def _verify(self, manifest: Manifest) -> None:
        for name, record in manifest.weights.items():
            weight = self._weights.get(record.same_as or name)
            if weight is None or tuple(weight_checksum(weight).tolist()) != record.checksum:
                raise DamagedVersionError(
                    f"{manifest.kind} version {manifest.version}: {name} differs after the update"
                )

    def _forget(self) -> None:
        self._weights, self._aliases, self._chain, self.version = {}, {}, "", -1

    def _explain(self, version: int | None, problem: str) -> ModelError:
        wanted = "any version" if version is None else f"version {version}"
        return ModelError(
            f"generator.delta_weight_sync.sync_dir={self._folder.address!r}: "
            f"{wanted} of the weights cannot be reached ({problem}); check that the trainer writes to "
            "this address, then restart this engine, which starts at the newest snapshot"
        )


def _count_bytes(path: list[Manifest]) -> int:
    return sum(manifest.size_bytes for manifest in path)
