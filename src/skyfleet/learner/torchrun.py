"""TorchrunGroup: the ranks of a learner that torchrun started; rank 0 is the process of the loop.

Commands travel over one connection per rank. A rank that dies closes it, so its death is seen at once,
also while it waits for the next command, which may take as long as rollouts do.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener, wait
from queue import Queue
from time import monotonic
from typing import Any

from torch._C._distributed_c10d import TCPStore

from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, LearnerLostError
from skyfleet.learner.rank_store import RankPlace, open_store
from skyfleet.learner.rank_worker import RankWorker

logger = logging.getLogger(__name__)

_KEY = "skyfleet/control"
_GRACE_SECONDS = 10.0
"""How long the other ranks may take to answer after one has failed."""
_RESUME = "run the same command again: it goes on from the last checkpoint and its journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    result: Any = None
    error: BaseException | None = None
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


class TorchrunGroup:
    """The `RankGroup` of rank 0."""

    def __init__(
        self, config: RunConfig, place: RankPlace, *, policy: str, total_steps: int
    ) -> None:
        self._timeout_seconds = config.trainer.placement.rank_timeout_seconds
        self.world_size = place.world_size
        self._lost: str | None = None
        self._own = _OwnRank()
        self._connections: list[Connection] = []
        if place.world_size > 1:
            self._connections, place = _meet_ranks(place, self._timeout_seconds)
        try:
            self._run(
                "build",
                (config, policy, total_steps),
                lambda: _build(config, place, policy, total_steps),
            )
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        return self._run(method, arguments, lambda: getattr(self._own.worker, method)(*arguments))

    def iterate(self, method: str) -> Iterator[Any]:
        """Of rank 0, item by item; the other ranks run beside it."""
        self._send(method, ())
        items: Queue[_Reply] = Queue(maxsize=1)
        done = threading.Event()

        def produce() -> None:
            for item in getattr(self._own.worker, method)():
                # Every rank takes part to the end, also when the caller has stopped reading.
                if not done.is_set():
                    items.put(_Reply(result=item, item=True))

        self._own.start(produce)
        waiting = {connection: rank for rank, connection in enumerate(self._connections, 1)}
        try:
            while True:
                reply = self._next_item(items, waiting)
                if reply is None:
                    break
                yield reply.result
        finally:
            done.set()
            while not items.empty():
                items.get_nowait()
            if self._lost is None:
                self._collect(method, waiting)

    def close(self) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.send_bytes(pickle.dumps(("close", ())))
        if self._lost is None:
            with suppress(Exception):
                self._own.start(self._own.close)
                self._own.wait(_GRACE_SECONDS)
        for connection in self._connections:
            connection.close()
        self._lost = self._lost or "the learner is closed"

    def _run(self, method: str, arguments: tuple[Any, ...], own: Callable[[], Any]) -> Any:
        self._send(method, arguments)
        self._own.start(own)
        waiting = {connection: rank for rank, connection in enumerate(self._connections, 1)}
        self._collect(method, waiting)
        return self._own.take_result()

    def _send(self, method: str, arguments: tuple[Any, ...]) -> None:
        if self._lost is not None:
            raise LearnerLostError(self._lost)
        command = pickle.dumps((method, arguments))
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.send_bytes(command)
            except OSError:
                self._lose(f"rank {rank} of the learner died")

    def _collect(self, method: str, waiting: dict[Connection, int]) -> None:
        """Until every rank has answered. The error of a rank is raised, and ends the group."""
        deadline, errors = monotonic() + self._timeout_seconds, list[BaseException]()
        while waiting or not self._own.is_done:
            if self._own.is_done and self._own.error is not None and not errors:
                errors.append(self._own.error)
                deadline = min(deadline, monotonic() + _GRACE_SECONDS)
            if (failed := self._read_replies(waiting)) is not None:
                errors.append(failed)
                deadline = min(deadline, monotonic() + _GRACE_SECONDS)
            if monotonic() > deadline:
                break
        if self._own.is_done and self._own.error is not None:
            errors.append(self._own.error)
        if not errors and not waiting and self._own.is_done:
            return
        if not errors:
            late = [0] * (not self._own.is_done) + sorted(waiting.values())
            self._lose(
                f"rank {late[0]} of the learner has not finished {method} in "
                f"{self._timeout_seconds:g} seconds (trainer.placement.rank_timeout_seconds)"
            )
        self._lost = f"the learner has lost ranks: {errors[0]}"
        # A rank that died says more than those whose connection to it broke.
        deaths = [error for error in errors if isinstance(error, LearnerLostError)]
        raise (deaths or errors)[0]

    def _read_replies(self, waiting: dict[Connection, int]) -> BaseException | None:
        ready = wait(list(waiting), timeout=0.02) if waiting else []
        if not waiting:
            self._own.wait(0.02)
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                reply: _Reply = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return LearnerLostError(f"rank {rank} of the learner died; {_RESUME}")
            if reply.error is not None:
                return reply.error
        return None

    def _next_item(self, items: Queue[_Reply], waiting: dict[Connection, int]) -> _Reply | None:
        deadline = monotonic() + self._timeout_seconds
        while monotonic() < deadline:
            if not items.empty():
                return items.get()
            if self._own.is_done:
                return None if items.empty() else items.get()
            if (failed := self._read_replies(waiting)) is not None:
                self._lost = f"the learner has lost ranks: {failed}"
                raise failed
            self._own.wait(0.002)
        self._lose("the learner has sent no weight within trainer.placement.rank_timeout_seconds")
        raise AssertionError

    def _lose(self, reason: str) -> None:
        self._lost = f"{reason}; {_RESUME}"
        raise LearnerLostError(self._lost)


class _OwnRank:
    """Rank 0 in a thread of its own, which a rank that hangs does not keep from ending."""

    def __init__(self) -> None:
        self.worker: RankWorker | None = None
        self.error: BaseException | None = None
        self._result: Any = None
        self._calls: Queue[Callable[[], Any]] = Queue()
        self._done = threading.Event()
        threading.Thread(target=self._serve, name="learner", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def start(self, call: Callable[[], Any]) -> None:
        self.error = self._result = None
        self._done.clear()
        self._calls.put(call)

    def wait(self, timeout_seconds: float) -> None:
        self._done.wait(timeout_seconds)

    def take_result(self) -> Any:
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()

    def _serve(self) -> None:
        while True:
            call = self._calls.get()
            try:
                self._result = call()
                if isinstance(self._result, RankWorker):
                    self.worker = self._result
            except BaseException as error:
                self.error = error
            self._done.set()


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
                worker = _build(config, place, policy, total_steps)
                result = None
            else:
                result = getattr(worker, method)(*arguments)
                if isinstance(result, Iterator):
                    for _ in result:
                        pass
            reply = _Reply()
        except Exception as error:
            reply = _Reply(error=_picklable(error))
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(reply))


def _build(config: RunConfig, place: RankPlace, policy: str, total_steps: int) -> RankWorker:
    return RankWorker(config, place, policy=policy, total_steps=total_steps)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return LearnerLostError(f"{type(error).__name__}: {error}")
    return error


def _meet_ranks(place: RankPlace, timeout_seconds: float) -> tuple[list[Connection], RankPlace]:
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
    connection = Client((contact["host"], contact["port"]), authkey=bytes.fromhex(contact["authkey"]))
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
