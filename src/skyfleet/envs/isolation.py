"""Isolation: run a user's environment in the event loop, in a thread, or in a worker process.

`auto` starts in the event loop. Once two episodes of an environment have blocked it, its later ones
start in a thread each; once it has held the interpreter lock there, in a worker process. If the first
that was moved fails there, later ones start in the event loop again. A running call is never moved.
The adapters that skyfleet brings are written for the event loop and stay there.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from skyfleet.chat.message import Message
from skyfleet.envs.env import Env, EnvFactory, Observation, Step
from skyfleet.envs.guard import Isolation, Mode, current_guard
from skyfleet.envs.thread_env import ThreadEnv, open_in_thread
from skyfleet.envs.worker_env import WorkerEnv, open_in_worker
from skyfleet.envs.worker_process import NotMovableError, pack_source
from skyfleet.errors import EpisodeError
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.episode_clock import current_clock

logger = logging.getLogger(__name__)

_RECENT_EPISODES = 50
"""Two of so many must block: the first may load something, and a busy machine holds up any code."""
_MAX_RETURNS = 2
"""After so many moves that failed, an environment stays in the event loop."""
_OTHER_LOOP = ("a different event loop", "a different loop")
"""In asyncio's errors for an object that belongs to another event loop."""

T = TypeVar("T")


class Place(IntEnum):
    LOOP = 0
    THREAD = 1
    PROCESS = 2


_NAMES = {Place.THREAD: "threads of their own", Place.PROCESS: "worker processes"}


@dataclass(slots=True, kw_only=True)
class _EnvRecord:
    """What the episodes of one environment did."""

    place: Place = Place.LOOP
    n_opened: int = 0
    blocking: list[int] = field(default_factory=list)
    """The numbers of the recent episodes that blocked."""
    works_there: bool = False
    """Whether an episode that was moved to `place` has ended without an error."""
    n_returns: int = 0

    def note_stall(self, number: int, *, holds_interpreter: bool) -> bool:
        """Note that an episode blocked; True if later ones are to start elsewhere."""
        recent = [n for n in self.blocking if n > self.n_opened - _RECENT_EPISODES]
        self.blocking = recent if number in recent else [*recent, number]
        place = Place.PROCESS if holds_interpreter else Place.THREAD
        if len(self.blocking) < 2 or self.n_returns >= _MAX_RETURNS or place <= self.place:
            return False
        self.place, self.works_there, self.blocking = place, False, []
        return True

    def go_back(self, *, n_returns: int) -> None:
        self.place, self.n_returns, self.blocking = Place.LOOP, n_returns, []


class _FactoryRecord:
    """What is known of a factory; it does not hold the factory."""

    def __init__(self) -> None:
        self.envs: defaultdict[str, _EnvRecord] = defaultdict(_EnvRecord)
        self.packed: bytes | None = None
        self.logged: set[str] = set()


class MovableFactory:
    """Opens a user's environment where its isolation says, by what it did before."""

    def __init__(
        self, open_env: EnvFactory, *, source: object, record: _FactoryRecord | None = None
    ) -> None:
        """`source` is what a worker process makes the factory of: `module:name` or an object."""
        self._open_env, self._source = open_env, source
        self.__wrapped__ = open_env
        self._record = record or _FactoryRecord()

    async def __call__(self, task: Task) -> Env:
        guard = current_guard.get()
        isolation = guard.isolation if guard is not None else None
        if guard is None or isolation is None or isolation.mode == "none":
            return await self._open_env(task)
        record = self._record.envs[task.env_key]
        record.n_opened += 1
        guard.on_stall = partial(self._note_stall, task.env_key, record, record.n_opened)
        place = _choose(isolation.mode, record)
        if place is Place.LOOP:
            return await self._open_env(task)
        if isolation.mode != "auto":
            return await self._open_elsewhere(place, task, isolation)
        report = partial(self._note_end, task.env_key, record, place)
        return _TrialEnv(await _watch(self._open_elsewhere(place, task, isolation), report), report)

    async def _open_elsewhere(
        self, place: Place, task: Task, isolation: Isolation
    ) -> ThreadEnv | WorkerEnv:
        guard, record = current_guard.get(), self._record
        assert guard is not None
        if place is Place.PROCESS:
            try:
                record.packed = record.packed or pack_source(self._source)
                return await open_in_worker(
                    record.packed,
                    task,
                    guard,
                    memory_gb=isolation.worker_memory_gb,
                    max_characters=isolation.max_observation_chars,
                )
            except NotMovableError as error:
                self._log_once(
                    f"environment {task.env_key} runs in threads, not in processes: {error}"
                )
        return await open_in_thread(self._open_env, task, guard)

    def _note_stall(
        self, env_key: str, record: _EnvRecord, number: int, holds_interpreter: bool
    ) -> None:
        if record.note_stall(number, holds_interpreter=holds_interpreter):
            logger.warning(
                "later episodes of environment %s start in %s (environment.isolation=auto)",
                env_key,
                _NAMES[record.place],
            )

    def _note_end(
        self, env_key: str, record: _EnvRecord, place: Place, error: EpisodeError | None
    ) -> None:
        """An episode that was moved to `place` has ended, with `error`."""
        if error is None:
            record.works_there = True
        elif record.place is not place:
            return  # others have reported it
        elif any(sign in str(error) for sign in _OTHER_LOOP):
            record.go_back(n_returns=_MAX_RETURNS)
            self._log_once(
                f"environment {env_key} shares objects of the event loop between its episodes, so "
                "it stays there although it blocks it"
            )
        elif not record.works_there:
            record.go_back(n_returns=record.n_returns + 1)
            self._log_once(
                f"the first episode of environment {env_key} in {_NAMES[place]} failed ({error}), "
                "so later ones start in the event loop again, although it blocks it"
            )

    def _log_once(self, sentence: str) -> None:
        if sentence not in self._record.logged:
            self._record.logged.add(sentence)
            logger.warning("%s", sentence)


class _TrialEnv:
    """An environment that was moved, and whose first error is reported."""

    def __init__(
        self, env: ThreadEnv | WorkerEnv, report: Callable[[EpisodeError | None], None]
    ) -> None:
        self._env, self._report, self._has_failed = env, report, False

    async def reset(self) -> Observation:
        return await _watch(self._env.reset(), self._fail)

    async def step(self, action: Message) -> Step:
        return await _watch(self._env.step(action), self._fail)

    async def grade(self) -> Grade | None:
        return await _watch(self._env.grade(), self._fail)

    async def close(self) -> None:
        await _watch(self._env.close(), self._fail)
        if not self._has_failed:
            self._report(None)

    def _fail(self, error: EpisodeError) -> None:
        self._has_failed = True
        self._report(error)


async def _watch(calling: Awaitable[T], report: Callable[[EpisodeError], None]) -> T:
    try:
        return await calling
    except EpisodeError as error:
        clock = current_clock.get()
        if clock is None or not clock.has_expired:  # else it was interrupted
            report(error)
        raise


def _choose(mode: Mode, record: _EnvRecord) -> Place:
    if mode == "process":
        return Place.PROCESS
    return max(record.place, Place.THREAD) if mode == "thread" else record.place


_records: WeakKeyDictionary[EnvFactory, _FactoryRecord] = WeakKeyDictionary()


def isolate(open_env: EnvFactory) -> EnvFactory:
    """Make a factory of the user's movable; skyfleet's own decide for themselves."""
    module = getattr(open_env, "__module__", None) or type(open_env).__module__
    if isinstance(open_env, MovableFactory) or module.startswith("skyfleet."):
        return open_env
    try:
        record = _records.get(open_env)
        if record is None:
            _records[open_env] = record = _FactoryRecord()
    except TypeError:  # not hashable, or without weak references
        return open_env
    return MovableFactory(open_env, source=open_env, record=record)
