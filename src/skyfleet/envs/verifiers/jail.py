"""Jail: runs verifiers that strangers wrote, each in a process that can do nothing but judge.

Workers stay; every verification is a fork of one. Whatever a verifier does to its own process,
the next verification starts from a clean one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

from skyfleet.envs.verifiers import seccomp
from skyfleet.envs.verifiers.jail_frames import Question, pack_request, read_reply
from skyfleet.envs.verifiers.jail_process import JailProcess, plain_command, walled_command
from skyfleet.errors import VerifierError
from skyfleet.tasks.grade import Grade

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_GRACE_SECONDS = 10.0
"""A worker ends its child in time; one that does not is ended itself so much later."""

_GREETING = pack_request(
    Question(
        code="def verify(env): return 1",
        final_answer=None,
        conversation=None,
        partial_credit=False,
        timeout_seconds=_START_SECONDS,
    ),
    seed=b"",
    current=b"",
)


class Jail:
    """Use it from any event loop, one after another or at once; close it when no more is graded."""

    def __init__(self, *, n_workers: int | None = None, bwrap: str = "bwrap") -> None:
        self._n_workers = n_workers or os.cpu_count() or 1
        self._bwrap = shutil.which(bwrap)
        if self._bwrap is None:
            _warn(f"{bwrap} is not installed")
        if not seccomp.SUPPORTED:
            logger.warning(
                "verifiers run without a filter of system calls: there is none for %s yet",
                platform.machine(),
            )
        self._walls_hold = False
        self._closed = False
        self._idle: list[JailProcess] = []
        self._busy: set[JailProcess] = set()
        self._owner_pid = os.getpid()
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

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
        """As `run_verifier`, on two database images. VerifierError also for what was not allowed."""
        question = Question(
            code=code,
            final_answer=final_answer,
            conversation=conversation,
            partial_credit=partial_credit,
            timeout_seconds=timeout_seconds,
        )
        request = pack_request(question, seed, current)
        async with self._gate():
            worker = await self._hire()
            reply = await self._ask(worker, request, timeout_seconds + _GRACE_SECONDS)
        return read_reply(reply)

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    def close(self) -> None:
        """No process is left. Verifications under way end as unknown, and no more begin."""
        self._closed = True
        self._forget_after_fork()
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

    def _gate(self) -> asyncio.Semaphore:
        """A semaphore belongs to one loop, and every asyncio.run has its own."""
        loop = asyncio.get_running_loop()
        return self._gates.setdefault(loop, asyncio.Semaphore(self._n_workers))

    async def _ask(self, worker: JailProcess, request: bytes, timeout_seconds: float) -> bytes:
        self._busy.add(worker)
        answered = False
        try:
            reply = await worker.ask(request, timeout_seconds)
            answered = True
        except OSError as error:
            raise VerifierError(
                f"the jail's worker failed ({error}); "
                "the grade is unknown, another worker takes its place"
            ) from error
        finally:
            self._busy.discard(worker)
            if answered and worker.alive and not self._closed:
                self._idle.append(worker)
            else:
                worker.end()
        return reply

    async def _hire(self) -> JailProcess:
        if self._closed:
            raise VerifierError("the jail is closed, so the grade is unknown; open another Jail")
        self._forget_after_fork()
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.end()
        try:
            return await self._start()
        except OSError as error:
            raise VerifierError(
                f"the jail cannot be opened ({error}); the grade is unknown"
            ) from error

    async def _start(self) -> JailProcess:
        bwrap = self._bwrap
        if bwrap is not None:
            try:
                worker = await _started(walled_command(bwrap))
            except ConnectionError as error:
                # Walls that held once and do not now are an accident, not a reason to do without.
                if self._walls_hold:
                    raise
                if self._bwrap is not None:
                    self._bwrap = None
                    _warn(str(error))
            else:
                self._walls_hold = True
                return worker
        return await _started(plain_command())

    def _forget_after_fork(self) -> None:
        """The workers of the process that this one was forked from are not its own."""
        if self._owner_pid != os.getpid():
            self._owner_pid = os.getpid()
            self._idle, self._busy = [], set()


async def _started(command: list[str]) -> JailProcess:
    """A worker that has answered once, so whoever is hired afterwards works."""
    worker = JailProcess(command)
    try:
        read_reply(await worker.ask(_GREETING, _START_SECONDS))
    except BaseException:
        worker.end()
        raise
    return worker


def _warn(reason: str) -> None:
    logger.warning(
        "VERIFIERS RUN OUTSIDE A SANDBOX: %s. Limits%s remain. "
        "Install bubblewrap (apt install bubblewrap) and allow unprivileged user namespaces "
        "before tasks of strangers are graded.",
        reason,
        " and a filter of system calls" if seccomp.SUPPORTED else "",
    )
