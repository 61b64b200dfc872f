"""CounterEnv: press the button until it reads three, then stop; break it where you like."""

from __future__ import annotations

import asyncio
from typing import Literal

from skyfleet.chat.message import Message
from skyfleet.envs.env import Env, EnvFactory, Observation, Step
from skyfleet.tasks.task import Grade, Task

Place = Literal["open", "reset", "step", "grade", "close"]

PRESS = '{"name": "press", "arguments": {"by": %d}}'
TASK = Task(key="t", env_key="counter", prompt="reach 3")


class CounterEnv:
    def __init__(
        self, *, breaks: Place | None = None, error: Exception | None = None, hangs: bool = False
    ) -> None:
        """`breaks` names the call that raises `error`, or `hangs` for a minute instead."""
        self.count, self.closed = 0, 0
        self._breaks, self._error, self._hangs = breaks, error or OSError("it broke"), hangs

    async def reset(self) -> Observation:
        await self.passing("reset")
        return Observation(messages=(Message(role="user", content="reach 3"),))

    async def step(self, action: Message) -> Step:
        await self.passing("step")
        if not action.tool_calls:
            return Step(done=True)
        self.count += int(action.tool_calls[0].arguments["by"])
        return Step(messages=(Message(role="tool", content=str(self.count)),))

    async def grade(self) -> Grade | None:
        await self.passing("grade")
        return Grade(reward=float(self.count == 3), success=self.count == 3)

    async def close(self) -> None:
        self.closed += 1
        await self.passing("close")

    async def passing(self, place: Place) -> None:
        if place != self._breaks:
            return
        if not self._hangs:
            raise self._error
        await asyncio.sleep(60)


def make_factory(env: Env) -> EnvFactory:
    """Opens `env`, whatever the task; an env that breaks in `open` breaks here."""

    async def open_env(task: Task) -> Env:
        if isinstance(env, CounterEnv):
            await env.passing("open")
        return env

    return open_env
