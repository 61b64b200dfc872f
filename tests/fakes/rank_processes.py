"""Real processes over gloo, forked from one that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_PRELOADED = ["tests.fakes.sharded_cases"]
_DEADLINE_SECONDS = 240.0


def run_ranks(n_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call the function on every rank of a gloo group; return what each returns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with TemporaryDirectory() as folder:
        started = []
        for rank in range(n_ranks):
            ours, theirs = context.Pipe()
            place = (rank, n_ranks, str(Path(folder) / "store"))
            process = context.Process(
                target=_run_rank, args=(theirs, place, function, arguments), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            return [_receive(connection, rank) for rank, (_, connection) in enumerate(started)]
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def _receive(connection: Connection, rank: int) -> Any:
    if not connection.poll(_DEADLINE_SECONDS):
        raise TimeoutError(f"rank {rank} has not answered")
    result, error = pickle.loads(connection.recv_bytes())
    if error:
        raise AssertionError(f"rank {rank} failed:\n{error}")
    return result


def _run_rank(
    connection: Connection,
    place: tuple[int, int, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    rank, n_ranks, store = place
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    outcome: tuple[Any, str | None]
    try:
        dist.init_process_group(
            "gloo", rank=rank, world_size=n_ranks, init_method=f"file://{store}"
        )
        outcome = (function(*arguments), None)
    except BaseException:
        outcome = (None, traceback.format_exc())
    # Not `send`, which leaves tensors in memory that this process shares while it lives.
    connection.send_bytes(pickle.dumps(outcome))
    os._exit(0)  # without the destructors of a group whose other ranks may be gone
