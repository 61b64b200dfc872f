"""DeltaPublisher: writes each version of the weights as a compressed delta to the one before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor

from skyfleet.models.weights import weight_checksum
from skyfleet.weight_transfer.buckets import BYTES_PER_GB, TransferReport
from skyfleet.weight_transfer.delta_folder import DeltaFolder, hash_file
from skyfleet.weight_transfer.delta_format import (
    MANIFEST,
    FileRecord,
    Kind,
    Manifest,
    WeightRecord,
    as_bits,
    compress,
)

MAX_DELTAS = 64
"""Per full snapshot, for receivers that start late."""


@dataclass(slots=True)
class _Chain:
    """What the current chain holds, for the decision to start anew and for pruning."""

    name: str
    version: int
    full_version: int
    full_bytes: int
    delta_bytes: int = 0
    n_deltas: int = 0

    @property
    def is_long(self) -> bool:
        """Its deltas together cost a late receiver as much as a snapshot."""
        return self.delta_bytes > self.full_bytes or self.n_deltas >= MAX_DELTAS


class DeltaPublisher:
    """Keeps a copy of the last published weights on the host, in the published dtype.

    The first version is a full snapshot under a new chain name. When the deltas have become as large
    as a snapshot, the next version is written as both. Versions before the last two snapshots are
    removed, so that a receiver that reads the older of them is not cut off.
    """

    def __init__(
        self,
        sync_dir: str,
        *,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = BYTES_PER_GB,
    ) -> None:
        """`dtype` is that of the engines, to which floating-point weights are rounded."""
        self.sync_dir = sync_dir
        self._folder, self._dtype, self._max_file_bytes = (
            DeltaFolder(sync_dir),
            dtype,
            max_file_bytes,
        )
        self._last: dict[str, Tensor] = {}
        self._aliases: dict[str, str] = {}
        self._chain: _Chain | None = None
        self._old_fulls: list[int] = []

    @property
    def last_weights(self) -> dict[str, Tensor]:
        """The last version on the host, without second names."""
        return dict(self._last)

    @torch.no_grad()
    def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> TransferReport:
        """Write one version. After a failure, or without a newer number, a new chain starts."""
        start, chain = perf_counter(), self._chain
        self._chain = None  # until the version is written
        if chain is None or version <= chain.version:
            self._folder.sweep()
            self._folder.clear()  # of an earlier process: nothing continues its chain
            self._last, self._aliases, self._old_fulls = {}, {}, []
            written = [self._write("full", weights, version, chain=uuid4().hex, base=None)]
        else:
            written = [self._write("delta", weights, version, chain=chain.name, base=chain.version)]
            chain.version, chain.n_deltas = version, chain.n_deltas + 1
            chain.delta_bytes += written[0].size_bytes
            if chain.is_long:
                written.append(self._write_again(version, chain))
        if written[-1].kind == "full":
            chain = _Chain(
                name=written[-1].chain,
                version=version,
                full_version=version,
                full_bytes=written[-1].size_bytes,
            )
        self._chain = chain
        return TransferReport(
            n_bytes=sum(manifest.size_bytes for manifest in written),
            seconds=perf_counter() - start,
            n_transfers=sum(len(manifest.files) for manifest in written),
        )

    def _write_again(self, version: int, chain: _Chain) -> Manifest:
        """The version that was just written as a delta, as a snapshot."""
        last, self._last = self._last, {}
        tied = [(name, last[first]) for name, first in self._aliases.items()]
        written = self._write("full", [*last.items(), *tied], version, chain=chain.name, base=None)
        self._old_fulls.append(chain.full_version)
        self._prune()
        return written

    def _write(
        self,
        kind: Kind,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        chain: str,
        base: int | None,
    ) -> Manifest:
        records: dict[str, WeightRecord] = {}
        with self._folder.write(kind, version) as draft:
            writer = _PartWriter(draft, self._max_file_bytes)
            for name, weight, delta in self._compare(weights, records):
                records[name] = WeightRecord(
                    dtype=str(weight.dtype).removeprefix("torch."),
                    shape=tuple(weight.shape),
                    checksum=tuple(weight_checksum(weight).tolist()),
                    file=None if delta is None else writer.add(name, delta),
                )
            manifest = Manifest(
                chain=chain,
                kind=kind,
                version=version,
                base_version=base,
                files=writer.close(),
                weights=records,
            )
            (draft / MANIFEST).write_text(manifest.model_dump_json(), encoding="utf-8")
        return manifest

    def _compare(
        self, weights: Iterable[tuple[str, Tensor]], records: dict[str, WeightRecord]
    ) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Each weight on the host with its compressed change; None if it has not changed.

        A second name of a weight that is in this version already is recorded, and skipped.
        """
        pointers: dict[tuple[Any, ...], str] = {}
        self._aliases = {}
        for name, given in weights:
            rounds = self._dtype is not None and given.is_floating_point()
            dtype = self._dtype if rounds else given.dtype
            weight = given.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
            first = pointers.setdefault((given.data_ptr(), given.dtype, given.shape), name)
            if first != name and torch.equal(as_bits(weight), as_bits(self._last[first])):
                records[name] = records[first].model_copy(update={"file": None, "same_as": first})
                self._aliases[name] = first
                self._last.pop(name, None)
                continue
            last = self._last.get(name)
            bits = as_bits(weight)
            changed = bits if last is None else bits ^ as_bits(last)
            self._last[name] = weight
            yield name, weight, compress(changed) if last is None or changed.any() else None

    def _prune(self) -> None:
        """Keep the newest snapshot, the one before it, and all that follows that one."""
        if len(self._old_fulls) < 2:
            return
        self._old_fulls = self._old_fulls[-1:]
        (oldest,) = self._old_fulls
        for kind, version in self._folder.list_versions():
            if version < oldest or (kind == "delta" and version == oldest):
                self._folder.remove(kind, version)


class _PartWriter:
    """Collects payloads into safetensors files of a bounded size."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._payloads: dict[str, Tensor] = {}
        self._n_bytes = 0
        self._files: list[FileRecord] = []

    def add(self, name: str, payload: Tensor) -> int:
        """The index of the file that the payload is in."""
        if self._payloads and self._n_bytes + len(payload) > self._max_bytes:
            self._flush()
        self._payloads[name] = payload
        self._n_bytes += len(payload)
        return len(self._files)

    def close(self) -> tuple[FileRecord, ...]:
        if self._payloads:
            self._flush()
        return tuple(self._files)

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._files):04d}.safetensors"
        save_file(self._payloads, path)
        self._files.append(
            FileRecord(name=path.name, size_bytes=path.stat().st_size, sha256=hash_file(path))
        )
        self._payloads, self._n_bytes = {}, 0
