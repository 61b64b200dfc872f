"""How the ranks of a learner find each other, and what every rank but the first runs."""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from torch._C._distributed_c10d import TCPStore

from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, LearnerLostError
from skyfleet.learner.rank_store import RankPlace, open_store
from skyfleet.learner.rank_worker import RankReport, RankWorker

logger = logging.getLogger(__name__)

_KEY = "skyfleet/control"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    result: Any = None
    error: BaseException | None = None
    failure: Exception | None = None
    """The error of an update, of which the rank has made a report; the others may wait for it."""
    item: bool = False
    """One of several results of an iteration."""


def is_started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1


def read_place() -> RankPlace:
    """This process's rank by torchrun's variables; the only rank without torchrun."""
    env = os.environ
    if not is_started_by_torchrun():
        return RankPlace(rank=0, world_size=1, address=f"127.0.0.1:{_find_free_port()}")
    try:
        return RankPlace(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            address=f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
            local_rank=int(env.get("LOCAL_RANK", "0")),
            store_is_open=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    except KeyError as error:
        raise ConfigError(
            f"WORLD_SIZE={env.get('WORLD_SIZE')} without {error.args[0]}; start the ranks with torchrun"
        ) from None


def serve_rank(
    place: RankPlace, timeout_seconds: float, *, on_connected: Callable[[], None] = lambda: None
) -> None:
    """Of every other rank: run the commands of rank 0 until it closes or dies."""
    connection, place = _meet_first(place, timeout_seconds)
    on_connected()
    worker: RankWorker | None = None
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            logger.warning("rank %s: rank 0 has ended", place.rank)
            return
        if method == "close":
            if worker is not None:
                with suppress(Exception):
                    worker.close()
            return
        try:
            if method == "build":
                config, policy, total_steps = arguments
                worker = build_worker(config, place, policy, total_steps)
                result = None
            else:
                result = getattr(worker, method)(*arguments)
                if isinstance(result, Iterator):
                    for _ in result:
                        pass
            failure = result.error if isinstance(result, RankReport) else None
            reply = Reply(failure=None if failure is None else _picklable(failure))
        except Exception as error:
            reply = Reply(error=_picklable(error))
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(reply))


def build_worker(config: RunConfig, place: RankPlace, policy: str, total_steps: int) -> RankWorker:
    return RankWorker(config, place, policy=policy, total_steps=total_steps)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return LearnerLostError(f"{type(error).__name__}: {error}")
    return error


def meet_ranks(place: RankPlace, timeout_seconds: float) -> tuple[list[Connection], RankPlace]:
    """The connection of each rank from 1 on, and the place with the store that is open now."""
    authkey = secrets.token_bytes(32)
    listener = Listener((_own_address(place), 0), backlog=place.world_size, authkey=authkey)
    store = open_store(place, timeout_seconds)
    host, port = listener.address
    store.set(_KEY, json.dumps({"host": host, "port": port, "authkey": authkey.hex()}))
    by_rank: dict[int, Connection] = {}
    listener._listener._socket.settimeout(timeout_seconds)  # type: ignore[attr-defined]
    try:
        while len(by_rank) < place.world_size - 1:
            connection = listener.accept()
            by_rank[connection.recv()] = connection
    except TimeoutError:
        missing = sorted(set(range(1, place.world_size)) - by_rank.keys())
        raise LearnerLostError(
            f"rank {missing[0]} of the learner has not connected within "
            f"trainer.placement.rank_timeout_seconds={timeout_seconds:g}"
        ) from None
    finally:
        listener.close()
    return [by_rank[rank] for rank in sorted(by_rank)], _with_open_store(place, store)


def _meet_first(place: RankPlace, timeout_seconds: float) -> tuple[Connection, RankPlace]:
    store = open_store(place, timeout_seconds)
    contact: Mapping[str, Any] = json.loads(store.get(_KEY))
    connection = Client(
        (contact["host"], contact["port"]), authkey=bytes.fromhex(contact["authkey"])
    )
    connection.send(place.rank)
    return connection, _with_open_store(place, store)


_stores: list[TCPStore] = []
"""Kept open: the server of a store ends with its object."""


def _with_open_store(place: RankPlace, store: TCPStore) -> RankPlace:
    _stores.append(store)
    return replace(place, store_is_open=True)


def _own_address(place: RankPlace) -> str:
    """The address of this machine that the other ranks can reach."""
    host = place.address.rpartition(":")[0]
    return (
        host if host in ("127.0.0.1", "localhost") else socket.gethostbyname(socket.gethostname())
    )


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
