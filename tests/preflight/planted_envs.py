"""Environments with one fault each, opened by name as a user's own."""

from __future__ import annotations

import asyncio

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.envs.env import Env, Observation, Step
from skyfleet.tasks.task import Grade, Task

PRESS = ToolSpec(name="press", description="Press.", parameters={"type": "object"})


class PressEnv:
    def __init__(self, task: Task) -> None:
        self._key = task.env_key

    async def reset(self) -> Observation:
        return Observation(messages=(Message(role="user", content="press"),), tools=(PRESS,))

    async def step(self, action: Message) -> Step:
        if self._key == "hanging":
            await asyncio.sleep(3600)
        if not action.tool_calls:
            return Step(done=True)
        reply = Message(role="tool", content="1", tool_call_id=action.tool_calls[0].id)
        return Step(messages=(reply,))

    async def grade(self) -> Grade | None:
        return None if self._key == "ungraded" else Grade(reward=1.0, success=True)


async def open_press(task: Task) -> Env:
    """`hanging` never answers a tool call, `ungraded` has no grade, `closed` does not open."""
    if task.env_key == "closed":
        raise OSError("the door is locked")
    return PressEnv(task)
