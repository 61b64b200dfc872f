"""Run untrusted verifiers in sandboxed worker processes.

Workers persist; each forks a child per verification. Whatever a verifier does to its own process,
the next verification starts from a clean one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

from skyfleet.envs.verifiers.confinement import (
    Confinement,
    build_bwrap_command,
    build_plain_command,
    probe_confinement,
)
from skyfleet.envs.verifiers.jail_process import JailProcess
from skyfleet.envs.verifiers.jail_protocol import VerifyRequest, pack_request, unpack_reply
from skyfleet.envs.verifiers.lanes import SOFT_SECONDS, Lanes, Leases, count_slow, stopped_clock
from skyfleet.envs.verifiers.run_verifier import SUCCESS_REWARD, TimedOutVerifierError
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_GRACE_SECONDS = 10.0
"""A worker kills its child at the timeout; a worker that does not is killed this much later."""

_PROBE = pack_request(
    VerifyRequest(
        code="def verify(env): return 1",
        final_answer=None,
        conversation=None,
        partial_credit=False,
        timeout_seconds=_START_SECONDS,
    ),
    seed=b"",
    current=b"",
)

_MAIN = "from skyfleet.envs.verifiers.jail_worker import main; main(use_filter={use_filter})"


class Jail:
    """A pool of workers for any number of event loops; close it when no more is graded."""

    def __init__(
        self, *, n_workers: int | None = None, bwrap: str = "bwrap", allow_unconfined: bool = False
    ) -> None:
        """`n_workers` verifications run at once, and a few slow ones beside them."""
        self._n_workers = n_workers or os.cpu_count() or 1
        self._bwrap, self._allow_unconfined = bwrap, allow_unconfined
        self._confinement: Confinement | None = None
        self._closed = False
        self._idle: list[JailProcess] = []
        self._busy: set[JailProcess] = set()
        self._owner_pid = os.getpid()
        self._leases = Leases(self._n_workers + count_slow(self._n_workers))
        self._lanes: WeakKeyDictionary[asyncio.AbstractEventLoop, Lanes] = WeakKeyDictionary()

    async def verify(
        self,
        code: str,
        seed: bytes,
        current: bytes,
        final_answer: str | None,
        conversation: str | None = None,
        *,
        partial_credit: bool = False,
        timeout_seconds: float = 30.0,
    ) -> Grade:
        """Like `run_verifier`, on two database images. A forbidden action is a VerifierError too."""
        request = VerifyRequest(
            code=code,
            final_answer=final_answer,
            conversation=conversation,
            partial_credit=partial_credit,
            timeout_seconds=timeout_seconds,
        )
        packed = pack_request(request, seed, current)
        reply = None
        while reply is None:
            reply = await self._run_in_turn(hash(code), packed, timeout_seconds + _GRACE_SECONDS)
        verdict = unpack_reply(reply)
        success = verdict.reward >= SUCCESS_REWARD
        return Grade(reward=verdict.reward, success=success, explanation=verdict.stdout)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    def close(self) -> None:
        """End all workers. Verifications in progress end as unknown, and no new ones start."""
        self._closed = True
        self._drop_inherited_workers()
        for worker in self._busy:
            worker.interrupt()
        while self._idle:
            self._idle.pop().end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _run_in_turn(self, key: int, request: bytes, timeout_seconds: float) -> bytes | None:
        """Return the reply, or None if the verification must queue again, among the slow ones.

        Only the time after a worker has got the request counts as the verifier's.
        """
        lanes = self._get_lanes()
        with ExitStack() as at_end:
            with stopped_clock():
                place = await lanes.enter(key)
                at_end.callback(place.leave)
                lease = await self._leases.acquire(_START_SECONDS + timeout_seconds)
                at_end.callback(self._leases.release, lease)
                worker = await self._acquire_worker()
            asking = asyncio.ensure_future(self._ask(worker, request, timeout_seconds))
            try:
                soft_seconds = SOFT_SECONDS if place.is_fast else None
                done, _ = await asyncio.wait({asking}, timeout=soft_seconds)
                if not done and not place.move_to_slow():
                    return None
                reply = await asking
                if done:
                    lanes.remember(key, slow=False)
                return reply
            finally:
                await _cancel(asking)

    def _get_lanes(self) -> Lanes:
        """Lanes belong to one event loop, and every asyncio.run has its own."""
        return self._lanes.setdefault(asyncio.get_running_loop(), Lanes(self._n_workers))

    async def _ask(self, worker: JailProcess, request: bytes, timeout_seconds: float) -> bytes:
        self._busy.add(worker)
        answered = False
        try:
            reply = await worker.ask(request, timeout_seconds)
            answered = True
        except OSError as error:
            kind = TimedOutVerifierError if isinstance(error, TimeoutError) else VerifierError
            raise kind(
                f"the jail worker failed ({error}); the grade is unknown, a new worker replaces it"
            ) from error
        finally:
            self._busy.discard(worker)
            is_spare = len(self._idle) >= self._n_workers
            if answered and worker.alive and not is_spare and not self._closed:
                self._idle.append(worker)
            else:
                worker.end()
        return reply

    async def _acquire_worker(self) -> JailProcess:
        if self._closed:
            raise VerifierError("the jail is closed, so the grade is unknown; open another Jail")
        self._drop_inherited_workers()
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.end()
        try:
            return await self._start_worker()
        except OSError as error:
            raise VerifierError(
                f"the jail cannot start a worker ({error}); the grade is unknown"
            ) from error

    async def _start_worker(self) -> JailProcess:
        confinement = self._confinement
        if confinement is None:
            with ThreadPoolExecutor(max_workers=1) as pool:
                probing = pool.submit(probe_confinement, self._bwrap)
                confinement = await asyncio.wrap_future(probing)
        if not self._allow_unconfined:
            confinement.require()
        if self._confinement is None:
            self._confinement = confinement
            _warn_unsandboxed(confinement)
        program = _MAIN.format(use_filter=confinement.has_filter)
        # If the sandbox worked before, a failure now is no reason to run without it.
        if confinement.bwrap is not None:
            return await _start_process(build_bwrap_command(confinement.bwrap, program))
        return await _start_process(build_plain_command(program))

    def _drop_inherited_workers(self) -> None:
        """After a fork the workers belong to the parent process."""
        if self._owner_pid != os.getpid():
            self._owner_pid = os.getpid()
            self._idle, self._busy = [], set()


async def _start_process(command: list[str]) -> JailProcess:
    """Start a worker and wait until it has answered a probe."""
    worker = JailProcess(command)
    try:
        unpack_reply(await worker.ask(_PROBE, _START_SECONDS))
    except BaseException:
        worker.end()
        raise
    return worker


async def _cancel(asking: asyncio.Future[bytes]) -> None:
    """End a request that nobody waits for any more; its worker is replaced."""
    if not asking.done():
        asking.cancel()
        await asyncio.wait({asking})
    if not asking.cancelled():
        asking.exception()  # retrieved, so that asyncio does not report it as lost


def _warn_unsandboxed(confinement: Confinement) -> None:
    if confinement.bwrap is None:
        logger.warning(
            "VERIFIERS RUN OUTSIDE A SANDBOX: %s. Resource limits%s remain. "
            "Install bubblewrap (apt install bubblewrap) and allow unprivileged user namespaces "
            "before you grade tasks from untrusted sources.",
            confinement.bwrap_problem,
            " and a system call filter" if confinement.has_filter else "",
        )
    if not confinement.has_filter:
        logger.warning("verifiers run without a system call filter: %s", confinement.filter_problem)
