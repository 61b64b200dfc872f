"""Where a rank is, and the store at which the ranks of a learner meet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

# torch.distributed has both, without exporting them to type checkers.
from torch._C._distributed_c10d import PrefixStore, TCPStore


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank a process is, and where the ranks meet."""

    rank: int
    world_size: int
    address: str
    """HOST:PORT of the store at which the ranks meet; rank 0 opens it, unless it is open."""
    local_rank: int = 0
    """Of the ranks on this machine; the index of its GPU."""
    store_is_open: bool = False
    """Another process serves the store, as torchrun does."""


def open_store(place: RankPlace, timeout_seconds: float) -> TCPStore:
    host, _, port = place.address.rpartition(":")
    return TCPStore(
        host,
        int(port),
        is_master=place.rank == 0 and not place.store_is_open,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
    )


def open_rank_store(place: RankPlace, timeout_seconds: float) -> PrefixStore:
    """For the process group."""
    return PrefixStore("skyfleet/ranks", open_store(place, timeout_seconds))
