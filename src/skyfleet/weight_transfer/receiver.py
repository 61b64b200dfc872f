"""WeightReceiver: a rank of a transfer group that receives weights in buckets and verifies them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from skyfleet.errors import ModelError, SkyfleetError
from skyfleet.models.weights import weight_checksum
from skyfleet.weight_transfer.buckets import Entry, Header, TransferReport
from skyfleet.weight_transfer.control import ControlChannel
from skyfleet.weight_transfer.sender import DEFAULT_TIMEOUT_SECONDS
from skyfleet.weight_transfer.transports import Backend, Transport, open_transport


class WeightTarget(Protocol):
    """Where received weights go; both methods raise SentinelError if a weight is wrong."""

    def load(self, entries: Sequence[Entry], bucket: Tensor) -> None:
        """Copy the weights of a bucket, whose memory is used again afterwards."""
        ...

    def finish(self, computed: Mapping[str, Sequence[int]]) -> None:
        """All weights were sent; `computed` are checksums of those that the target computes."""
        ...


class WeightReceiver:
    def __init__(
        self,
        address: str,
        *,
        rank: int,
        world_size: int,
        backend: Backend,
        device: torch.device | str = "cpu",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """`address` is the sender's; ranks start at 1. `device` is that of the engine's weights."""
        self._control = ControlChannel(
            address, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds
        )
        self._backend, self._device = backend, torch.device(device)
        self._transport: Transport | None = None
        self._syncs = count()

    @torch.no_grad()
    def receive(self, target: WeightTarget, *, version: int | None = None) -> TransferReport:
        """Receive the next sync, which must be of `version`; the sender learns of an error too.

        After an error the target may hold weights of two versions.
        """
        start, n_bytes, n_buckets = perf_counter(), 0, 0
        sync, error = f"sync{next(self._syncs)}", None
        for header, bucket in self._receive_buckets(sync):
            n_bytes, n_buckets = n_bytes + header.n_bytes, n_buckets + (not header.is_end)
            # With an error the rest is received and dropped: other receivers depend on it.
            error = error or _load(target, header, bucket, version)
        self._control.report(f"{sync}/done", str(error) if error else "")
        if error:
            raise error
        return TransferReport(
            n_bytes=n_bytes, seconds=perf_counter() - start, n_transfers=n_buckets
        )

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the next sync one by one, as copies, for a loader that pulls them.

        The sender gets the report that they arrived when the last one was taken; it must ask for checksums
        of what the loader made of them. A second name of a weight is left to the loader, which ties.
        """
        sync, damaged = f"sync{next(self._syncs)}", ""
        for header, bucket in self._receive_buckets(sync):
            if isinstance(bucket, SkyfleetError):
                raise bucket
            for entry in header.entries:
                if entry.same_as is None:
                    weight = entry.view(bucket).clone()
                    if tuple(weight_checksum(weight).tolist()) != entry.checksum:
                        damaged = f"{entry.name} arrived damaged"
                    yield entry.name, weight
        self._control.report(f"{sync}/done", damaged)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        del self._control.store

    def _receive_buckets(self, sync: str) -> Iterator[Fetched]:
        """Each bucket, then the end."""
        try:
            if self._transport is None:
                self._transport = open_transport(self._backend, self._control, self._device)
            if self._backend == "ipc":
                yield from self._read_in_place(self._transport, sync)
            else:
                yield from self._receive_ahead(self._transport, sync)
            self._transport.end_sync()
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            with suppress(RuntimeError, ConnectionError):
                self._control.report(f"{sync}/failed", "")
            if isinstance(error, SkyfleetError):
                raise
            reason = str(error).strip().split("\n")[0]
            raise ModelError(
                f"weight sync: the learner's weights did not arrive ({reason}); restart this engine "
                "and open a new transfer group"
            ) from error

    def _read_in_place(self, transport: Transport, sync: str) -> Iterator[Fetched]:
        """The sender fills the other buffer meanwhile."""
        for number in count():
            header, bucket = self._fetch(transport, key := f"{sync}/{number}")
            yield header, bucket
            if header.is_end:
                return
            transport.release(key)

    def _receive_ahead(self, transport: Transport, sync: str) -> Iterator[Fetched]:
        """The next bucket is received while this one is used."""
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
            waiting = pool.submit(self._fetch, transport, f"{sync}/0")
            for number in count(1):
                header, bucket = waiting.result()
                if not header.is_end:
                    waiting = pool.submit(self._fetch, transport, f"{sync}/{number}")
                yield header, bucket
                if header.is_end:
                    return

    def _fetch(self, transport: Transport, key: str) -> Fetched:
        header = Header.model_validate_json(self._control.get(key))
        if header.error:
            raise ConnectionError(f"the sender stopped: {header.error}")
        if header.is_end:
            return header, torch.empty(0, dtype=torch.uint8)
        try:
            return header, transport.receive(header)
        except SkyfleetError as error:
            return header, error


Fetched = tuple[Header, Tensor | SkyfleetError]
"""A bucket, or why this receiver cannot read it."""


def _load(
    target: WeightTarget, header: Header, bucket: Tensor | SkyfleetError, version: int | None
) -> SkyfleetError | None:
    if isinstance(bucket, SkyfleetError):
        return bucket
    if version not in (None, header.version):
        return ModelError(f"got version {header.version} of the weights instead of {version}")
    try:
        if header.is_end:
            target.finish(header.computed)
        else:
            target.load(header.entries, bucket)
    except SkyfleetError as error:
        return error
    return None
