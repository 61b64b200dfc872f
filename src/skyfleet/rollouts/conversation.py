"""Conversation: the agent's side of an episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from skyfleet.chat.completion import Completion, Finish
from skyfleet.chat.message import Message
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Transcript
from skyfleet.engines.engine import ChatModel, Engine
from skyfleet.engines.sampling import SamplingParams
from skyfleet.envs.env import Opening
from skyfleet.tasks.task import Task


class Conversation(Protocol):
    finish: Finish

    def hear(self, messages: Sequence[Message]) -> None: ...

    async def speak(self) -> Message: ...

    async def close(self) -> None: ...

    @property
    def prompt_length(self) -> int: ...

    @property
    def transcripts(self) -> tuple[Transcript, ...]: ...


Policy = Callable[[Task, Opening, str], Conversation]
"""Starts a conversation for one episode of a task; the string names its session."""


class TokenConversation:
    """Speaks through an Engine and keeps every token it saw."""

    def __init__(
        self,
        opening: Opening,
        *,
        engine: Engine,
        renderer: Renderer,
        sampling: SamplingParams,
        session: str,
    ) -> None:
        self._engine, self._renderer = engine, renderer
        self._sampling, self._session = sampling, session
        self._messages: list[Message] = list(opening.messages)
        self._tools = opening.tools
        self._transcripts: list[Transcript] = []
        self.finish: Finish = "stop"
        self._reopen()

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return tuple(self._transcripts)

    @property
    def prompt_length(self) -> int:
        return len(self._transcripts[-1])

    async def speak(self) -> Message:
        transcript = self._transcripts[-1]
        completion = await self._complete(transcript.token_ids)
        transcript.say(completion)
        self.finish = completion.finish
        message = self._renderer.parse(completion.token_ids, self._tools)
        self._messages.append(message)
        return message

    def hear(self, messages: Sequence[Message]) -> None:
        self._messages.extend(messages)
        transcript = self._transcripts[-1]
        joined = self._renderer.join(transcript.token_ids[-1], messages)
        if joined is None:
            self._reopen()
        else:
            transcript.give(joined)

    async def close(self) -> None:
        await self._engine.release(self._session)

    async def _complete(self, token_ids: Sequence[int]) -> Completion:
        return await self._engine.generate(token_ids, self._sampling, session=self._session)

    def _reopen(self) -> None:
        transcript = Transcript()
        transcript.give(self._renderer.open(self._messages, self._tools))
        self._transcripts.append(transcript)


class MessageConversation:
    """Speaks through a ChatModel: teachers and baselines, no tokens to train on."""

    def __init__(self, opening: Opening, *, model: ChatModel, sampling: SamplingParams) -> None:
        self._model, self._sampling = model, sampling
        self._messages: list[Message] = list(opening.messages)
        self._tools = opening.tools
        self.finish: Finish = "stop"

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return ()

    @property
    def prompt_length(self) -> int:
        return 0

    async def speak(self) -> Message:
        message = await self._model.reply(self._messages, self._tools, self._sampling)
        self._messages.append(message)
        return message

    def hear(self, messages: Sequence[Message]) -> None:
        self._messages.extend(messages)

    async def close(self) -> None: ...
