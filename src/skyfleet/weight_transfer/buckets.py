"""Buckets: weights packed into byte buffers of a bounded size, with a header that describes each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from skyfleet.models.weights import weight_checksum

BYTES_PER_GB = 1_000_000_000
_ALIGNMENT = 256
"""Of each weight in its buffer: any dtype can view it, and copies on a GPU are coalesced."""

TakeBuffer = Callable[[int], Tensor]
"""Returns a buffer of at least so many bytes that nobody reads any more."""


class Entry(BaseModel):
    """One weight in a bucket."""

    model_config = ConfigDict(frozen=True)

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: tuple[int, ...]
    same_as: str | None = None
    """The weight that was sent before with this content, as for tied embeddings: no bytes follow."""

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def n_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """This weight inside the bytes of its bucket."""
        part = buffer[self.offset : self.offset + self.n_bytes]
        return part.view(self.torch_dtype).view(self.shape)


class Header(BaseModel):
    """What the sender says of a bucket before its bytes, or at the end of a sync."""

    model_config = ConfigDict(frozen=True)

    version: int
    entries: tuple[Entry, ...] = ()
    n_bytes: int = 0
    handles: dict[int, dict[str, Any]] = {}
    """By rank: where a receiver on this machine finds the bytes."""
    is_end: bool = False
    error: str = ""
    """Why the sender gave up."""
    computed: dict[str, tuple[int, ...]] = {}
    """Checksums of weights that receivers compute themselves, such as merged ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """How much a sync moved, and how long it took with its verification."""

    n_bytes: int
    seconds: float
    n_transfers: int = 1
    """Buckets or files."""

    @property
    def metrics(self) -> dict[str, float]:
        """For the log row of the step; docs/metrics.md describes them."""
        return {
            "weight_sync/bytes": float(self.n_bytes),
            "weight_sync/seconds_per_gb": self.seconds * BYTES_PER_GB / max(self.n_bytes, 1),
        }


class _Bucket:
    """A bucket that is being filled."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.n_bytes = buffer, 0
        self._entries: list[Entry] = []
        self._sums: list[Tensor] = []

    def fits(self, n_bytes: int) -> bool:
        return self.n_bytes + n_bytes <= len(self.buffer)

    def add(self, entry: Entry, weight: Tensor) -> Tensor:
        """Copy a weight to the end of the bucket; returns its checksum, not yet on the host."""
        entry = entry.model_copy(update={"offset": self.n_bytes})
        packed = entry.view(self.buffer)
        packed.copy_(weight)
        self.n_bytes += -(-entry.n_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._append(entry, weight_checksum(packed))

    def add_same(self, entry: Entry, sums: Tensor) -> None:
        self._append(entry, sums)

    def _append(self, entry: Entry, sums: Tensor) -> Tensor:
        self._entries.append(entry)
        self._sums.append(sums)
        return sums

    def close(self) -> tuple[Entry, ...]:
        """Waits for the device once, for all checksums."""
        rows = torch.stack(self._sums).tolist()
        return tuple(
            entry.model_copy(update={"checksum": tuple(row)})
            for entry, row in zip(self._entries, rows, strict=True)
        )


Packed = tuple[Tensor, int, tuple[Entry, ...]]
"""A buffer, the bytes used of it, and what they are."""


def pack_buckets(
    weights: Iterable[tuple[str, Tensor]],
    take_buffer: TakeBuffer,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
) -> Iterator[Packed]:
    """Pack weights in order. Each may be reused by its owner once the next one is asked for.

    Floating-point weights are rounded to `dtype`. A weight that is larger than a bucket gets a
    larger one of its own.
    """
    bucket: _Bucket | None = None
    sent: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
    for name, weight in weights:
        weight = weight.detach()
        entry = _describe(name, weight, dtype)
        if bucket is not None and not bucket.fits(entry.n_bytes):
            yield bucket.buffer, bucket.n_bytes, bucket.close()
            bucket = None
        if bucket is None:
            bucket = _Bucket(take_buffer(max(bucket_bytes, entry.n_bytes)))
        key = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        first, sums = sent.get(key, ("", None))
        # A gathered weight may be where an earlier one was, so that its content counts too.
        if sums is not None and torch.equal(
            sums, weight_checksum(weight.to(entry.torch_dtype)).to(sums.device)
        ):
            bucket.add_same(entry.model_copy(update={"same_as": first}), sums)
        else:
            sent[key] = (name, bucket.add(entry, weight))
    if bucket is not None:
        yield bucket.buffer, bucket.n_bytes, bucket.close()


def _describe(name: str, weight: Tensor, dtype: torch.dtype | None) -> Entry:
    target = weight.dtype if dtype is None or not weight.is_floating_point() else dtype
    return Entry(
        name=name,
        dtype=str(target).removeprefix("torch."),
        shape=tuple(weight.shape),
        offset=0,
        checksum=(),
    )
