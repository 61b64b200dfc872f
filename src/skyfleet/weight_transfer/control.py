"""ControlChannel: headers and acknowledgements of a weight transfer, through a TCP store.

Rank 0, the sender, hosts the store; receivers connect to its address. Messages are JSON. A process
that has the address can write to the store, as with every group of torch.distributed: keep its
port inside the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from skyfleet.errors import ConfigError

_STOPPED = "stopped"
_ALIVE_SECONDS = 3.0
"""How long receivers have to answer after a transfer failed, before they count as lost."""


class ControlChannel:
    def __init__(self, address: str, *, rank: int, world_size: int, timeout_seconds: float) -> None:
        """`address` is host:port of rank 0, which may choose a free port with 0.

        Every wait ends after `timeout_seconds` without an answer, with a TimeoutError.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"weight transfer: address={address!r} is not host:port")
        if not 0 <= rank < world_size or world_size < 2:
            raise ConfigError(
                f"weight transfer: rank={rank} of world_size={world_size}; rank 0 sends, and ranks 1 "
                "to world_size - 1 receive"
            )
        self.rank, self.world_size, self.timeout_seconds = rank, world_size, timeout_seconds
        try:
            self.store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                int(port),
                world_size,
                is_master=rank == 0,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            role = "listen" if rank == 0 else "connect"
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"weight transfer: rank {rank} cannot {role} at {address} ({reason}); use an address "
                "of rank 0's machine that all ranks can reach"
            ) from error
        self.address = f"{host}:{self.store.port}"
        self.receivers = range(1, world_size)

    def set(self, key: str, message: str) -> None:
        self.store.set(key, message)

    def get(self, key: str, *, timeout_seconds: float | None = None) -> str:
        """Wait for a message; TimeoutError if none comes, ConnectionError if rank 0 is gone."""
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            self.store.wait([key], timedelta(seconds=seconds))
            return self.store.get(key).decode()
        except dist.DistNetworkError as error:
            raise ConnectionError(f"rank 0 at {self.address} is gone") from error
        except (dist.DistStoreError, RuntimeError) as error:
            if "timeout" not in str(error).lower():
                raise ConnectionError(f"rank 0 at {self.address} is gone: {error}") from error
            raise TimeoutError(f"no message {key} within {seconds:g} s") from error

    def collect(self, prefix: str) -> dict[int, Any]:
        """The message of each receiver; TimeoutError names those that have sent none."""
        found: dict[int, Any] = {}
        silent: list[int] = []
        for rank in self.receivers:
            try:
                # A rank that is silent has used up the time of all.
                seconds = 0.001 if silent else self.timeout_seconds
                found[rank] = json.loads(self.get(f"{prefix}/{rank}", timeout_seconds=seconds))
            except TimeoutError:
                silent.append(rank)
        if silent:
            raise LostReceiversError(silent, self.timeout_seconds)
        return found

    def report(self, prefix: str, message: Any) -> None:
        """What this receiver has to say, for `collect`."""
        self.set(f"{prefix}/{self.rank}", json.dumps(message))

    def find_lost(self, prefix: str) -> list[int]:
        """The receivers that do not report that they live, after a transfer failed."""
        lost: list[int] = []
        for rank in self.receivers:
            try:
                seconds = min(_ALIVE_SECONDS, self.timeout_seconds) if not lost else 0.5
                self.get(f"{prefix}/{rank}", timeout_seconds=seconds)
            except TimeoutError:
                lost.append(rank)
        return lost

    def stop(self) -> None:
        """Sender: no transfer of this group goes on."""
        self.set(_STOPPED, "")

    @property
    def is_stopped(self) -> bool:
        stopped: bool = self.store.check([_STOPPED])
        return stopped

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.store.delete_key(key)


class LostReceiversError(TimeoutError):
    def __init__(self, ranks: list[int], seconds: float) -> None:
        super().__init__(f"receivers {ranks} did not answer within {seconds:g} s")
        self.ranks = ranks
