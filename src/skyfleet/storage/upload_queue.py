"""UploadQueue: run uploads in the background, retry failures, and wait for them before the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Condition, Thread
from time import monotonic

from skyfleet.redaction import redact

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 2.0
_MAX_RETRY_SECONDS = 60.0
FAILURES_BEFORE_REPORT = 10
"""About five minutes."""
STOP_SECONDS = 5.0

Check = Callable[[], None]
Work = Callable[[Check], None]
"""Uploads; it calls its argument between parts, which raises if the queue was stopped."""


class UploadStoppedError(Exception):
    """The deadline has passed; what was not complete is as if it had not begun."""


class UploadRejectedError(Exception):
    """Trying again cannot help; says why."""


@dataclass(slots=True, kw_only=True)
class _Job:
    work: Work
    priority: int
    failures: int = 0
    due: float = 0.0
    """On the monotonic clock."""


class UploadQueue:
    """Works off named uploads in one thread, the highest priority first.

    A failed upload is tried again, later each time, and never raises in the process that trains. An
    upload of the same name replaces one that waits, and follows one that runs. `guard` is called
    between parts too, and raises UploadRejectedError if nothing may be uploaded any more.
    """

    def __init__(self, title: str, *, guard: Check = lambda: None) -> None:
        self.title, self._guard = title, guard
        self.on_failing: Callable[[str, str], object] = lambda name, reason: None
        """Called in the queue's thread when an upload has failed `FAILURES_BEFORE_REPORT` times, with
        its name and the last error; not again before one has succeeded."""
        self._is_reported = False
        self._jobs: dict[Hashable, _Job] = {}
        self._running: Hashable | None = None
        self._changed = Condition()
        self._stopped = False
        self._thread: Thread | None = None

    def put(self, name: Hashable, work: Work, *, priority: int = 0) -> None:
        with self._changed:
            if self._stopped:
                return
            self._jobs[name] = _Job(work=work, priority=priority)
            if self._thread is None:
                self._thread = Thread(target=self._run, name=f"upload {self.title}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def pending(self) -> list[Hashable]:
        """What is not complete: waiting, running, or to be tried again."""
        with self._changed:
            running = [] if self._running is None else [self._running]
            return list(dict.fromkeys([*running, *self._jobs]))

    def wait(self, seconds: float) -> bool:
        """Whether everything is complete, now or within so many seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._jobs and self._running is None, timeout=seconds
            )

    def stop(self) -> list[Hashable]:
        """Stop what runs after its current part; returns what was not complete."""
        left = self.pending
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        return left

    def check(self) -> None:
        if self._stopped:
            raise UploadStoppedError
        self._guard()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            name, job = taken
            try:
                job.work(self.check)
                self._is_reported = False
            except UploadStoppedError:
                pass
            except UploadRejectedError as error:
                logger.warning("%s %s is not uploaded: %s", self.title, name, redact(str(error)))
            except Exception as error:
                self._put_back(name, job, error)
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _take(self) -> tuple[Hashable, _Job] | None:
        with self._changed:
            while not self._stopped:
                now = monotonic()
                due = [name for name, job in self._jobs.items() if job.due <= now]
                if due:
                    name = max(due, key=lambda name: self._jobs[name].priority)
                    self._running = name
                    return name, self._jobs.pop(name)
                next_due = min((job.due for job in self._jobs.values()), default=None)
                self._changed.wait(None if next_due is None else next_due - now)
        return None

    def _put_back(self, name: Hashable, job: _Job, error: Exception) -> None:
        wait_seconds = min(FIRST_RETRY_SECONDS * 2 ** min(job.failures, 10), _MAX_RETRY_SECONDS)
        with self._changed:
            if self._stopped or name in self._jobs:
                return  # a newer one follows
            job.failures += 1
            job.due = monotonic() + wait_seconds
            self._jobs[name] = job
        reason = redact(f"{type(error).__name__}: {error}")
        logger.warning(
            "%s %s was not uploaded (%s); trying again in %.0f s",
            self.title,
            name,
            reason,
            wait_seconds,
        )
        if job.failures >= FAILURES_BEFORE_REPORT and not self._is_reported:
            self._is_reported = True
            self.on_failing(f"{self.title} {name}", reason)
