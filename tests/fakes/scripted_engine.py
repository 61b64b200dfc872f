"""ScriptedEngine: returns its lines in order, whatever the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.fakes.chars import END, CharRenderer

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation
from skyfleet.rollouts.conversation import AgentFactory, TokenConversation
from skyfleet.tasks.task import Task


class ScriptedEngine:
    """Every session gets the lines from the first; an exception among them is raised."""

    def __init__(self, *lines: str | Exception, finish: Finish = "stop", delay: float = 0) -> None:
        self.policy_version = 0
        self.released: list[str] = []
        self._lines, self._finish, self._delay = lines, finish, delay
        self._completion: dict[str, int] = {}

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        await asyncio.sleep(self._delay)
        turn = self._completion.get(session, 0)
        self._completion[session] = turn + 1
        line = self._lines[turn]
        if isinstance(line, Exception):
            raise line
        text = (*map(ord, line), *((END,) if self._finish == "stop" else ()))
        return Completion(
            token_ids=text,
            logprobs=(-0.5,) * len(text),
            finish=self._finish,
            policy_version=self.policy_version,
        )

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


def token_agent(engine: Engine) -> AgentFactory:
    """An agent whose tokens are the characters of `engine`'s text."""

    def start(task: Task, observation: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            observation,
            engine=engine,
            renderer=CharRenderer(),
            sampling=SamplingParams(),
            session=session,
        )

    return start
