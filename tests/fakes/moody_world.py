"""Worlds that behave oddly towards anyone who does not know the solution by heart."""

from __future__ import annotations

from dataclasses import replace

from skyfleet.chat.message import Message
from skyfleet.envs.env import DONE, Step
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade, Task
from skyfleet.worlds.catalog import get_world
from skyfleet.worlds.env import WorldEnv


class MoodyWorld(WorldEnv):
    """Rewards an odd number of letters, so that even a random policy has something to learn."""

    letters = 0
    """Generated so far, in turns that neither call a tool nor finish."""

    async def step(self, action: Message) -> Step:
        if DONE not in action.text and not action.tool_calls:
            self.letters += len(action.text)
        return await super().step(action)

    async def grade(self) -> Grade:
        return Grade(reward=float(self.letters % 2), success=True)


class BreakingWorld(MoodyWorld):
    async def step(self, action: Message) -> Step:
        step = await super().step(action)
        if self.letters and self.letters % 2 == 0:
            raise OSError("the database is gone")
        return step


class UngradableWorld(MoodyWorld):
    async def grade(self) -> Grade:
        if self.letters and self.letters % 2 == 0:
            raise VerifierError("the verifier is broken")
        return await super().grade()


class ChattyWorld(MoodyWorld):
    """Answers idle talk with more than any context holds."""

    async def step(self, action: Message) -> Step:
        step = await super().step(action)
        if not self.letters:
            return step
        return replace(step, messages=(Message(role="user", content="no " * 2000),))


async def open_moody(task: Task) -> WorldEnv:
    return MoodyWorld(get_world(task.env_key), task)


async def open_breaking(task: Task) -> WorldEnv:
    return BreakingWorld(get_world(task.env_key), task)


async def open_ungradable(task: Task) -> WorldEnv:
    return UngradableWorld(get_world(task.env_key), task)


async def open_chatty(task: Task) -> WorldEnv:
    return ChattyWorld(get_world(task.env_key), task)
