"""ShoutingEnv: one tool, whose answer is as long as asked for."""

from __future__ import annotations

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.envs.env import Observation, Step
from skyfleet.tasks.task import Task


class ShoutingEnv:
    async def reset(self) -> Observation:
        tool = ToolSpec(name="shout", description="", parameters={"type": "object"})
        return Observation(messages=(Message(role="user", content="shout"),), tools=(tool,))

    async def step(self, action: Message) -> Step:
        (call,) = action.tool_calls
        text = "a" * int(call.arguments["length"])
        return Step(messages=(Message(role="tool", content=text, tool_call_id=call.id),))

    async def grade(self) -> None: ...

    async def close(self) -> None: ...


async def open_shouting(task: Task) -> ShoutingEnv:
    return ShoutingEnv()
