"""Router: several engines as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from skyfleet.chat.completion import Completion
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.chat_engine import ChatEngine, Spoken
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling import SamplingParams
from skyfleet.engines.seats import Seats


class Router(Seats[Engine]):
    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        """A turn that its engine broke off, as vLLM does for new weights, goes on from its tokens."""
        said = await self._part(token_ids, sampling, session)
        while said.finish == "abort":
            left = sampling.max_generate_length - len(said.token_ids)
            if left == 0:
                return replace(said, finish="length")
            shorter = replace(sampling, max_generate_length=left)
            more = await self._part((*token_ids, *said.token_ids), shorter, session)
            said = _joined(said, more)
        return said

    async def sleep(self) -> None:
        await asyncio.gather(*(seat.engine.sleep() for seat in self._seats))

    async def wake(self) -> None:
        await asyncio.gather(*(seat.engine.wake() for seat in self._seats))

    async def _part(
        self, token_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        return await self.ask(
            session, lambda engine: engine.generate(token_ids, sampling, session=session)
        )


class ChatRouter(Seats[ChatEngine]):
    async def speak(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> Spoken:
        return await self.ask(
            session, lambda engine: engine.speak(messages, tools, sampling, session=session)
        )


def _joined(said: Completion, more: Completion) -> Completion:
    return Completion(
        token_ids=said.token_ids + more.token_ids,
        logprobs=said.logprobs + more.logprobs,
        finish=more.finish,
        policy_version=min(said.policy_version, more.policy_version),
    )
