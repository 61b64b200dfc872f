"""Transports of buckets: a broadcast over NCCL or gloo, or memory that processes of one machine share."""

from __future__ import annotations

import os
import time
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from skyfleet.errors import ConfigError
from skyfleet.weight_transfer.buckets import Header
from skyfleet.weight_transfer.control import ControlChannel

Backend = Literal["nccl", "gloo", "ipc"]
"""`ipc`: CUDA IPC on one GPU, shared memory on CPUs of one machine."""
_N_BUFFERS = 2
"""One is filled while the other is on its way."""
_POLL_SECONDS, _POLLS_PER_CHECK = 0.0005, 500


class Transport(Protocol):
    def take_buffer(self, n_bytes: int) -> Tensor:
        """Sender: a buffer to fill, once its last content has arrived everywhere."""
        ...

    def send(self, buffer: Tensor, header: Header, key: str) -> None:
        """Sender: announce a bucket under `key` and start to send it."""
        ...

    def finish_send(self) -> None:
        """Sender: wait until every bucket has arrived."""
        ...

    def receive(self, header: Header) -> Tensor:
        """Receiver: the bytes of a bucket, valid until the one after the next is received."""
        ...

    def release(self, key: str) -> None:
        """Receiver: the bucket was copied."""
        ...

    def end_sync(self) -> None:
        """Free the buffers."""
        ...

    def abort(self) -> None:
        """After a failure: close the connections, so that ranks that wait for this one fail too."""
        ...


def open_transport(backend: Backend, control: ControlChannel, device: torch.device) -> Transport:
    if backend == "ipc":
        return SharedMemoryTransport(control, device)
    return BroadcastTransport(backend, control, device)


class BroadcastTransport:
    """A process group of its own, so that the default group of either process is not touched."""

    def __init__(
        self, backend: Literal["nccl", "gloo"], control: ControlChannel, device: torch.device
    ) -> None:
        self._control, self._device, self._backend = control, device, backend
        store = dist.PrefixStore("group", control.store)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=control.timeout_seconds)
        self._group: Any
        if backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, control.rank, control.world_size, timeout)
        else:
            self._group = _open_nccl(store, control, device, timeout)
        self._buffers: list[Tensor | None] = [None] * _N_BUFFERS
        self._works: list[Any] = [None] * _N_BUFFERS
        self._turn = 0

    def take_buffer(self, n_bytes: int) -> Tensor:
        turn = self._turn = (self._turn + 1) % _N_BUFFERS
        self._wait(self._works[turn])
        self._works[turn] = None
        buffer = self._buffers[turn]
        if buffer is None or len(buffer) < n_bytes:
            self._buffers[turn] = None  # freed before the larger one is allocated
            self._buffers[turn] = buffer = torch.empty(
                n_bytes, dtype=torch.uint8, device=self._device
            )
        return buffer

    def send(self, buffer: Tensor, header: Header, key: str) -> None:
        self._control.set(key, header.model_dump_json())
        if header.n_bytes:
            self._works[self._turn] = self._group.broadcast(buffer[: header.n_bytes], 0)

    def finish_send(self) -> None:
        for work in self._works:
            self._wait(work)
        self._works = [None] * _N_BUFFERS

    def receive(self, header: Header) -> Tensor:
        buffer = self.take_buffer(header.n_bytes)[: header.n_bytes]
        if header.n_bytes:
            self._wait(self._group.broadcast(buffer, 0))
        return buffer

    def release(self, key: str) -> None:
        """Nothing to do: each receiver has its own copy."""

    def end_sync(self) -> None:
        self._buffers, self._works = [None] * _N_BUFFERS, [None] * _N_BUFFERS

    def abort(self) -> None:
        group, self._group = self._group, None
        self.end_sync()
        if self._backend == "nccl":
            group.abort()
        del group

    def _wait(self, work: Any) -> None:
        if work is None:
            return
        if self._backend == "gloo":
            work.wait()
            return
        # NCCL's own wait only orders streams; it would not return if a rank is gone.
        started = time.monotonic()
        for polls in count():
            if work.is_completed():
                break
            if time.monotonic() > started + self._control.timeout_seconds:
                raise TimeoutError("the broadcast of a bucket did not end")
            if polls % _POLLS_PER_CHECK == _POLLS_PER_CHECK - 1 and self._control.is_stopped:
                raise ConnectionError("the sender stopped")
            time.sleep(_POLL_SECONDS)
        work.wait()


def _open_nccl(
    store: Any, control: ControlChannel, device: torch.device, timeout: timedelta
) -> Any:
    if device.type != "cuda" or not dist.is_nccl_available():
        raise ConfigError(
            f"generator.weight_sync_backend='nccl' cannot send weights on {device.type}; it needs CUDA "
            "and NCCL, so use gloo"
        )
    from torch.distributed import ProcessGroupNCCL  # absent in builds without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with torch.cuda.device(device):
        return ProcessGroupNCCL(store, control.rank, control.world_size, options)


@dataclass(slots=True, eq=False)
class _Slot:
    """A buffer of the sender, and who has not read it yet."""

    number: int
    buffer: Tensor
    path: str = ""
    """Of its anonymous file; empty on a GPU."""
    handles: dict[int, dict[str, Any]] = field(default_factory=dict)
    """One per receiver: CUDA IPC counts those who opened a handle."""
    unread: str = ""
    """Key of the bucket in it."""


class SharedMemoryTransport:
    """Receivers read the sender's own buffers, in place.

    On CPUs a buffer is an anonymous file, which the kernel frees with the sender.
    """

    def __init__(self, control: ControlChannel, device: torch.device) -> None:
        self._control, self._device = control, device
        self._slots: list[_Slot | None] = [None] * _N_BUFFERS
        self._files: list[int] = []
        self._opened: dict[int, Tensor] = {}
        """By number of the sender's buffer."""
        self._numbers = count()
        self._turn = 0

    def take_buffer(self, n_bytes: int) -> Tensor:
        turn = self._turn = (self._turn + 1) % _N_BUFFERS
        slot = self._slots[turn]
        if slot is not None:
            self._await_readers(slot)
        if slot is None or len(slot.buffer) < n_bytes:
            self._slots[turn] = slot = None  # freed before the larger one is allocated
            self._slots[turn] = slot = self._allocate(n_bytes)
        return slot.buffer

    def send(self, buffer: Tensor, header: Header, key: str) -> None:
        slot = self._slots[self._turn]
        assert slot is not None
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
        if not slot.handles:
            slot.handles = {rank: _describe(slot) for rank in self._control.receivers}
        slot.unread = key
        announced = header.model_copy(update={"handles": slot.handles})
        self._control.set(key, announced.model_dump_json())

    def finish_send(self) -> None:
        for slot in self._slots:
            if slot is not None:
                self._await_readers(slot)

    def receive(self, header: Header) -> Tensor:
        handle = header.handles[self._control.rank]
        number = handle["number"]
        if number not in self._opened:
            self._opened[number] = _open_handle(handle, self._device)
        return self._opened[number][: header.n_bytes]

    def release(self, key: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._control.report(f"{key}/read", "")

    def end_sync(self) -> None:
        self._slots, self._opened = [None] * _N_BUFFERS, {}
        for file in self._files:
            os.close(file)
        self._files = []
        if self._device.type == "cuda" and self._control.rank == 0:
            torch.cuda.ipc_collect()

    def abort(self) -> None:
        self.end_sync()

    def _await_readers(self, slot: _Slot) -> None:
        if key := slot.unread:
            self._control.collect(f"{key}/read")
            self._control.delete(f"{key}/read/{rank}" for rank in self._control.receivers)
            slot.unread = ""

    def _allocate(self, n_bytes: int) -> _Slot:
        number = next(self._numbers)
        if self._device.type == "cuda":
            buffer = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
            return _Slot(number=number, buffer=buffer)
        file = os.memfd_create("skyfleet-weights")
        self._files.append(file)
        os.ftruncate(file, n_bytes)
        path = f"/proc/{os.getpid()}/fd/{file}"
        return _Slot(number=number, buffer=_map_file(path, n_bytes), path=path)


_FIRST_HANDLE = 7
"""Arguments of `rebuild_cuda_tensor` from here on are handles, sizes and offsets."""


def _describe(slot: _Slot) -> dict[str, Any]:
    common = {"number": slot.number, "n_bytes": len(slot.buffer)}
    if slot.path:
        return {**common, "path": slot.path}
    arguments = reduce_tensor(slot.buffer)[1]  # type: ignore[no-untyped-call]
    parts = [
        {"b64": b64encode(part).decode()} if isinstance(part, bytes) else part
        for part in arguments[_FIRST_HANDLE:]
    ]
    uuid = str(torch.cuda.get_device_properties(slot.buffer.device).uuid)
    return {**common, "uuid": uuid, "ipc": parts}


def _open_handle(handle: dict[str, Any], device: torch.device) -> Tensor:
    if "path" in handle:
        try:
            return _map_file(handle["path"], handle["n_bytes"])
        except RuntimeError as error:
            raise ConfigError(
                f"weight transfer: {handle['path']} cannot be mapped ({error}); sender and receiver "
                "must run on one machine as one user, or use gloo"
            ) from error
    here = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
    if here != handle["uuid"]:
        raise ConfigError(
            f"weight transfer: the receiver is on {here} and the sender on GPU {handle['uuid']}; CUDA "
            "IPC is for one GPU, so use nccl"
        )
    parts = [b64decode(part["b64"]) if isinstance(part, dict) else part for part in handle["ipc"]]
    size = torch.Size([handle["n_bytes"]])
    index = torch.cuda.current_device() if device.index is None else device.index
    buffer: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        *(Tensor, size, (1,), 0, torch.storage.TypedStorage, torch.uint8, index), *parts
    )
    return buffer


def _map_file(path: str, n_bytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=n_bytes, dtype=torch.uint8)
