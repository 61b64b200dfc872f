"""WeightSender: rank 0 of a transfer group, which sends weights in buckets to all receivers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from time import perf_counter
from traceback import clear_frames

import torch
from torch import Tensor

from skyfleet.errors import EngineLostError, SentinelError, SkyfleetError
from skyfleet.weight_transfer.buckets import Header, TransferReport, pack_buckets
from skyfleet.weight_transfer.control import ControlChannel, LostReceiversError
from skyfleet.weight_transfer.transports import Backend, Transport, open_transport

REMEDY = "restart it and open a new transfer group, or run the same command to resume"
DEFAULT_BUCKET_BYTES = 1_000_000_000
DEFAULT_TIMEOUT_SECONDS = 300.0

Computed = Callable[[], Mapping[str, list[int]]]
"""Checksums of weights that receivers compute from what was sent."""


class WeightSender:
    """Sends `Learner.named_weights()`, and returns when every receiver has verified them.

    Bucket k+1 is gathered while bucket k is on its way. After an EngineLostError the group is of no
    use any more: open a new one with the receivers that are left.
    """

    def __init__(
        self,
        address: str,
        *,
        world_size: int,
        backend: Backend,
        device: torch.device | str = "cpu",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """`address` is host:port, with port 0 for a free one; receivers need `self.address`.

        `dtype` is that of the engines, to which float32 masters are rounded before they are sent.
        The first transfer waits for all receivers. Any wait for a receiver ends after
        `timeout_seconds`.
        """
        self._control = ControlChannel(
            address, rank=0, world_size=world_size, timeout_seconds=timeout_seconds
        )
        self.address = self._control.address
        self._backend, self._device = backend, torch.device(device)
        self._bucket_bytes, self._dtype = bucket_bytes, dtype
        self._transport: Transport | None = None
        self._syncs = count()
        self._is_broken = False

    @torch.no_grad()
    def send(
        self,
        weights: Iterable[tuple[str, Tensor]],
        *,
        version: int,
        computed: Computed = dict,
    ) -> TransferReport:
        """SentinelError if a receiver then holds other weights, EngineLostError if one is gone."""
        if self._is_broken:
            raise EngineLostError("a weight transfer failed before in this group", REMEDY)
        start, sync = perf_counter(), f"sync{next(self._syncs)}"
        keys: list[str] = []
        try:
            if self._transport is None:
                self._transport = open_transport(self._backend, self._control, self._device)
            n_bytes = self._send_buckets(self._transport, weights, version, sync, keys, computed)
            answers = self._control.collect(f"{sync}/done")
            self._transport.end_sync()  # receivers have closed their views of its buffers
        except _SourceError as error:
            self._give_up(sync, keys, version, error.cause)
            raise error.cause from None
        except (SkyfleetError, torch.OutOfMemoryError) as error:
            self._give_up(sync, keys, version, error)
            raise
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            raise self._explain(sync, keys, version, error) from error
        except BaseException as error:
            self._give_up(sync, keys, version, error)
            raise
        self._control.delete([*keys, *(f"{sync}/done/{rank}" for rank in self._control.receivers)])
        for rank, answer in answers.items():
            if answer:
                raise SentinelError(f"weight sync: engine rank {rank}: {answer}")
        return TransferReport(
            n_bytes=n_bytes, seconds=perf_counter() - start, n_transfers=len(keys) - 1
        )

    def close(self) -> None:
        """Receivers that still wait for this sender then fail."""
        if self._transport is not None:
            self._transport.abort()
        self._is_broken = True
        del self._control.store

    def _send_buckets(
        self,
        transport: Transport,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        sync: str,
        keys: list[str],
        computed: Computed,
    ) -> int:
        total = 0
        packed = pack_buckets(
            _mark_errors(weights),
            transport.take_buffer,
            bucket_bytes=self._bucket_bytes,
            dtype=self._dtype,
        )
        for buffer, n_bytes, entries in packed:
            keys.append(f"{sync}/{len(keys)}")
            header = Header(version=version, entries=entries, n_bytes=n_bytes)
            transport.send(buffer, header, keys[-1])
            total += n_bytes
        keys.append(f"{sync}/{len(keys)}")
        sums = {name: tuple(row) for name, row in computed().items()}
        end = Header(version=version, is_end=True, computed=sums)
        self._control.set(keys[-1], end.model_dump_json())
        transport.finish_send()
        return total

    def _give_up(self, sync: str, keys: list[str], version: int, error: BaseException) -> None:
        """Tell receivers, which may wait for the next bucket or have read this one already."""
        self._is_broken = True
        message = f"{type(error).__name__}: {error}"
        stop = Header(version=version, is_end=True, error=message).model_dump_json()
        with suppress(RuntimeError):
            self._control.stop()
            for number in range(len(keys), len(keys) + 2):
                self._control.set(f"{sync}/{number}", stop)
        if self._transport is not None:
            self._transport.abort()

    def _explain(
        self, sync: str, keys: list[str], version: int, error: Exception
    ) -> EngineLostError:
        # Its frames hold work on the group, whose connections close with the last reference to it.
        clear_frames(error.__traceback__)
        self._give_up(sync, keys, version, error)
        if isinstance(error, LostReceiversError):
            lost = error.ranks
        else:
            lost = self._control.find_lost(f"{sync}/failed")
        who = f"engine ranks {lost}" if lost else "an engine"
        reason = str(error).strip().split("\n")[0]
        return EngineLostError(
            f"weight sync of version {version}: {who} did not take the weights ({reason})", REMEDY
        )


class _SourceError(Exception):
    """The learner could not give a weight: no fault of a receiver."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _mark_errors(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    try:
        yield from weights
    except Exception as error:
        raise _SourceError(error) from error
