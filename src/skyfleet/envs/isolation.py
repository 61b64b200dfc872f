"""Isolation: run a user's environment in the event loop, in a thread, or in a worker process.

`auto` starts in the event loop. Once an environment has blocked it, its later episodes start in a
thread each; once it has held the interpreter lock there, in a worker process. A running call is never
moved. The adapters that skyfleet brings are written for the event loop and stay there.
"""

from __future__ import annotations

import logging
from collections import Counter
from enum import IntEnum
from functools import partial
from weakref import WeakKeyDictionary

from skyfleet.envs.env import Env, EnvFactory
from skyfleet.envs.guard import Isolation, Mode, current_guard
from skyfleet.envs.thread_env import open_in_thread
from skyfleet.envs.worker_env import NotMovableError, open_in_worker, pack_source
from skyfleet.tasks.task import Task

logger = logging.getLogger(__name__)

_CERTAIN_SECONDS = 1.0
"""One stall this long moves later episodes; of shorter ones it takes two, because a busy machine
can hold up any code."""


class Place(IntEnum):
    LOOP = 0
    THREAD = 1
    PROCESS = 2


class MovableFactory:
    """Opens a user's environment where its isolation says, by what it did before."""

    def __init__(self, open_env: EnvFactory, *, source: object) -> None:
        """`source` is what a worker process makes the factory of: `module:name` or an object."""
        self._open_env, self._source = open_env, source
        self._places: dict[str, Place] = {}
        self._stalls: Counter[str] = Counter()
        self._packed: bytes | None = None
        self._logged: set[str] = set()

    async def __call__(self, task: Task) -> Env:
        guard = current_guard.get()
        isolation = guard.isolation if guard is not None else None
        if guard is None or isolation is None or isolation.mode == "none":
            return await self._open_env(task)
        guard.on_stall = lambda seconds, held: self._note_stall(task.env_key, seconds, held)
        place = self._choose(isolation.mode, task.env_key)
        if place is Place.PROCESS:
            try:
                self._packed = self._packed or pack_source(self._source)
                return await open_in_worker(
                    self._packed,
                    task,
                    guard,
                    memory_gb=isolation.worker_memory_gb,
                    max_characters=isolation.max_observation_chars,
                )
            except NotMovableError as error:
                self._log_once(
                    f"environment {task.env_key} runs in threads, not in processes: {error}"
                )
        if place is Place.LOOP:
            return await self._open_env(task)
        return await open_in_thread(self._open_env, task, guard)

    def _stay(self, isolation: Isolation, env_key: str) -> None:
        if isolation.mode == "auto":
            self._places[env_key] = Place.LOOP
            self._stalls[env_key] = -(10**9)
            self._log_once(
                f"environment {env_key} shares objects of the event loop between its episodes, so "
                "it stays there although it blocks it"
            )

    def _choose(self, mode: Mode, env_key: str) -> Place:
        if mode == "process":
            return Place.PROCESS
        known = self._places.get(env_key, Place.LOOP)
        return max(known, Place.THREAD) if mode == "thread" else known

    def _note_stall(self, env_key: str, seconds: float, holds_interpreter: bool) -> None:
        self._stalls[env_key] += 2 if seconds >= _CERTAIN_SECONDS else 1
        if self._stalls[env_key] < 2:
            return
        place = Place.PROCESS if holds_interpreter else Place.THREAD
        if place > self._places.get(env_key, Place.LOOP):
            self._places[env_key] = place
            logger.warning(
                "later episodes of environment %s start in %s (environment.isolation=auto)",
                env_key,
                "worker processes" if holds_interpreter else "threads of their own",
            )

    def _log_once(self, sentence: str) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            logger.warning("%s", sentence)


_movable: WeakKeyDictionary[EnvFactory, MovableFactory] = WeakKeyDictionary()


def isolate(open_env: EnvFactory) -> EnvFactory:
    """Make a factory of the user's movable; skyfleet's own decide for themselves."""
    module = getattr(open_env, "__module__", None) or type(open_env).__module__
    if isinstance(open_env, MovableFactory) or module.startswith("skyfleet."):
        return open_env
    try:
        found = _movable.get(open_env)
        if found is None:
            found = MovableFactory(open_env, source=open_env)
            _movable[open_env] = found
    except TypeError:  # not hashable, or without weak references
        return open_env
    return found
