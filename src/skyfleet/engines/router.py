"""Router: several engines as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from skyfleet.chat.completion import Completion
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.chat_engine import ChatEngine, Spoken
from skyfleet.engines.engine import Engine
from skyfleet.engines.living import tell_living
from skyfleet.engines.sampling import SamplingParams
from skyfleet.engines.seats import Seats
from skyfleet.engines.stopping import said_stop
from skyfleet.errors import EngineError


class Router(Seats[Engine]):
    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """`decode_text` is for stop strings that begin before a turn is broken off and end after."""
        super().__init__(engines)
        self._decode_text = decode_text

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
            said = self._joined(said, more, sampling.stop)
        return said

    async def sleep(self) -> None:
        await tell_living(self.engines, lambda engine: engine.sleep())

    async def wake(self) -> None:
        await tell_living(self.engines, lambda engine: engine.wake())

    async def _part(
        self, token_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        async def turn(engine: Engine) -> Completion:
            said = await engine.generate(token_ids, sampling, session=session)
            if said.finish == "abort" and not said.token_ids:
                # Asked again, it may do so forever.
                raise EngineError("the engine broke a turn off before its first token")
            return said

        return await self.ask(session, turn)

    def _joined(self, said: Completion, more: Completion, stops: Sequence[str]) -> Completion:
        token_ids, finish = list(said.token_ids), more.finish
        for token in more.token_ids:
            token_ids.append(token)
            # The engine saw the second part alone.
            if stops and self._decode_text and said_stop(stops, token_ids, self._decode_text):
                finish = "stop"
                break
        return Completion(
            token_ids=tuple(token_ids),
            logprobs=(said.logprobs + more.logprobs)[: len(token_ids)],
            finish=finish,
            policy_version=min(said.policy_version, more.policy_version),
        )


class ChatRouter(Seats[ChatEngine]):
    """A session that moves is rendered anew there, and its transcript may not go on."""

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
