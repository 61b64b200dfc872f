"""Ranks of a TorchrunGroup in real processes, whose worker is a fake without a model."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

from torch._C._distributed_c10d import TCPStore

from skyfleet.learner import rank_process
from skyfleet.learner.rank_store import RankPlace
from skyfleet.learner.rank_worker import RankReport


class FakeWorker:
    """Does what its arguments say, by rank."""

    def __init__(self, config: Any, place: RankPlace, *, policy: str, total_steps: int) -> None:
        self._rank = place.rank

    def step(self, behaviour: dict[int, str]) -> str | RankReport:
        match behaviour.get(self._rank):
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(600)
            case "fail":
                raise ValueError(f"rank {self._rank} failed")
            case "report":
                return RankReport(report=None, error=ValueError(f"rank {self._rank} failed"))
        return f"answer of rank {self._rank}"

    def named_weights(self) -> Iterator[tuple[str, int]]:
        yield from (("first", self._rank), ("second", self._rank))

    def close(self) -> None: ...


def serve_fake_rank(place: RankPlace) -> None:
    setattr(rank_process, "RankWorker", FakeWorker)  # noqa: B010
    rank_process.serve_rank(place, 30.0)


def open_store() -> tuple[TCPStore, str]:
    """As torchrun's agent does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    return store, f"127.0.0.1:{port}"
