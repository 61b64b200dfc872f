"""Served: the episodes that an MCP server has open, one a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import Any
from uuid import uuid4

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.blocks import DONE_META, blocks_of
from skyfleet.envs.env import Env, EnvFactory, Observation
from skyfleet.envs.lifecycle import opened
from skyfleet.errors import EnvError, EpisodeError, VerifierError, wrap_errors
from skyfleet.tasks.task import Task


class Episode:
    def __init__(self, task: Task, env: Env, opening: Observation, closing: AsyncExitStack) -> None:
        self.task, self.opening = task, opening
        self._env, self._closing = env, closing
        self._turn = asyncio.Lock()
        self._used, self._over = monotonic(), False
        self._told: dict[str, Any] | None = None

    @property
    def idle_seconds(self) -> float:
        return 0.0 if self._turn.locked() else monotonic() - self._used

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What `tools/call` answers; calls that come together are made one after another."""
        async with self._turn:
            self._used = monotonic()
            if self._over:
                text = "Error: the episode is over; open another session."
                return {"content": blocks_of(text), "isError": True}
            call = ToolCall(id="call_0", name=name, arguments=arguments)
            with wrap_errors(EnvError, "step"):
                step = await self._env.step(Message(role="assistant", tool_calls=(call,)))
            self._over = step.done
            return {
                "content": [block for reply in step.messages for block in blocks_of(reply.content)],
                "isError": any(reply.is_error for reply in step.messages),
                "_meta": {DONE_META: step.done},
            }

    async def grade(self) -> dict[str, Any]:
        """Ends the episode. The env is asked once; whoever asks again hears the same."""
        async with self._turn:
            self._used, self._over = monotonic(), True
            if self._told is None:
                self._told = await self._graded()
            return self._told

    async def _graded(self) -> dict[str, Any]:
        try:
            with wrap_errors(VerifierError, "grade"):
                grade = await self._env.grade()
        except EpisodeError as error:
            return {"reward": None, "error": str(error)}
        if grade is None:
            return {"reward": None}
        return {
            "reward": grade.reward,
            "success": grade.success,
            "explanation": grade.explanation,
        }

    async def close(self) -> None:
        async with self._turn:
            self._over = True
            await self._closing.aclose()


class Episodes:
    def __init__(
        self, open_env: EnvFactory, *, max_sessions: int, idle_timeout_seconds: float
    ) -> None:
        self._open_env, self._max_sessions = open_env, max_sessions
        self._idle_timeout_seconds = idle_timeout_seconds
        self._places = asyncio.Semaphore(max_sessions)
        self._open: dict[str, Episode] = {}

    def find(self, session_id: str, task_key: str) -> Episode | None:
        episode = self._open.get(session_id)
        return episode if episode is not None and episode.task.key == task_key else None

    async def open(self, task: Task) -> tuple[str, Episode]:
        if self._places.locked():
            raise EnvError(f"all {self._max_sessions} sessions are open; close one or come again")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._places)
            env = await opened(self._open_env, task, stack)
            with wrap_errors(EnvError, "reset"):
                opening = await env.reset()
            session_id, episode = uuid4().hex, Episode(task, env, opening, stack.pop_all())
        self._open[session_id] = episode
        return session_id, episode

    async def close(self, session_id: str) -> None:
        episode = self._open.pop(session_id, None)
        if episode is not None:
            await episode.close()

    @asynccontextmanager
    async def kept(self, app: object) -> AsyncIterator[None]:
        """As an app's lifespan: the idle are closed while it runs, the rest when it ends."""
        reaping = asyncio.create_task(self._reap())
        try:
            yield
        finally:
            reaping.cancel()
            await asyncio.gather(reaping, return_exceptions=True)
            for session_id in tuple(self._open):
                await self.close(session_id)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._idle_timeout_seconds / 4)
            for session_id, episode in tuple(self._open.items()):
                if episode.idle_seconds > self._idle_timeout_seconds:
                    await self.close(session_id)
