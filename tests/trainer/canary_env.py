"""An environment whose errors, logs and grades repeat the secrets that it was given."""

from __future__ import annotations

import logging
import os

from skyfleet.chat.message import Message
from skyfleet.envs.env import Observation, Step
from skyfleet.tasks.task import Grade, Task

CANARY = "canary0f8a77c1"
"""The start of every secret of the run."""
VARIABLE = "CANARY_OF_THE_RUN"

logger = logging.getLogger("skyfleet.canary")


class LeakingEnv:
    """Fails for the first task, and else ends after one turn."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def reset(self) -> Observation:
        secrets = " and ".join(find_secrets())
        logger.warning("connecting with %s", secrets)
        if self._task.key == "leaks":
            raise OSError(f"cannot log in to https://bot:{find_secrets()[0]}@host with {secrets}")
        return Observation(messages=(Message(role="user", content=self._task.prompt),))

    async def step(self, action: Message) -> Step:
        return Step(done=True, info={find_secrets()[0]: 1.0})

    async def grade(self) -> Grade:
        return Grade(
            reward=0.5,
            success=False,
            parts={find_secrets()[1]: 0.5},
            explanation=f"wrong: {find_secrets()[1]}",
        )

    async def close(self) -> None:
        return None


def find_secrets() -> list[str]:
    return os.environ[VARIABLE].split(",")


async def open_leaking(task: Task) -> LeakingEnv:
    return LeakingEnv(task)
