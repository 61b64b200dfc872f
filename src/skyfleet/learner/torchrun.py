"""TorchrunGroup: the ranks of a learner that torchrun started; rank 0 is the process of the loop.

Commands travel over one connection per rank. A rank that dies closes it, so its death is seen at once,
also while it waits for the next command, which may take as long as rollouts do.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from queue import Queue
from time import monotonic
from typing import Any

from skyfleet.config.root import RunConfig
from skyfleet.errors import LearnerLostError
from skyfleet.learner.rank_process import Reply, build_worker, meet_ranks
from skyfleet.learner.rank_store import RankPlace
from skyfleet.learner.rank_worker import RankReport, RankWorker

_GRACE_SECONDS = 10.0
"""How long the other ranks may take to answer after one has failed."""
_RESUME = "run the same command again: it goes on from the last checkpoint and its journal"


class TorchrunGroup:
    """The `RankGroup` of rank 0."""

    def __init__(
        self, config: RunConfig, place: RankPlace, *, policy: str, total_steps: int
    ) -> None:
        self._timeout_seconds = config.trainer.placement.rank_timeout_seconds
        self.world_size = place.world_size
        self._lost: str | None = None
        self._failures: list[Exception] = []
        self._own = _OwnRank()
        self._connections: list[Connection] = []
        if place.world_size > 1:
            self._connections, place = meet_ranks(place, self._timeout_seconds)
        try:
            self._own.worker = self._run(
                "build",
                (config, policy, total_steps),
                lambda: build_worker(config, place, policy, total_steps),
            )
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        return self._run(method, arguments, lambda: getattr(self._own.worker, method)(*arguments))

    def iterate(self, method: str) -> Iterator[Any]:
        """Of rank 0, item by item; the other ranks run beside it."""
        self._send(method, ())
        items: Queue[Reply] = Queue(maxsize=1)
        done = threading.Event()

        def produce() -> None:
            for item in getattr(self._own.worker, method)():
                # Every rank takes part to the end, also when the caller has stopped reading.
                if not done.is_set():
                    items.put(Reply(result=item, item=True))

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
        self._failures.clear()
        has_failed = False
        while waiting or not self._own.is_done:
            if self._own.is_done and self._own.error is not None and not errors:
                errors.append(self._own.error)
                deadline = min(deadline, monotonic() + _GRACE_SECONDS)
            if (failed := self._read_replies(waiting)) is not None:
                errors.append(failed)
                deadline = min(deadline, monotonic() + _GRACE_SECONDS)
            if not has_failed and (self._failures or self._own.failure is not None):
                has_failed = True  # the others may wait in a collective for what does not come
                deadline = min(deadline, monotonic() + _GRACE_SECONDS)
            if monotonic() > deadline:
                break
        if self._own.is_done and self._own.error is not None:
            errors.append(self._own.error)
        all_done = not waiting and self._own.is_done
        if not errors and all_done and (not has_failed or self._own.failure is not None):
            return
        if not errors and has_failed:
            errors.append(self._own.failure or self._failures[0])
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
                reply: Reply = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return LearnerLostError(f"rank {rank} of the learner died; {_RESUME}")
            if reply.error is not None:
                return reply.error
            if reply.failure is not None:
                self._failures.append(reply.failure)
        return None

    def _next_item(self, items: Queue[Reply], waiting: dict[Connection, int]) -> Reply | None:
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

    @property
    def failure(self) -> Exception | None:
        """The error of an update, of which the worker has made a report."""
        result = self._result if self.is_done else None
        return result.error if isinstance(result, RankReport) else None

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
            except BaseException as error:
                self.error = error
            self._done.set()
