"""Engine: the policy as tokens in, tokens out. ChatModel: anyone else who talks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError


class Engine(Protocol):
    policy_version: int

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        """Continue `token_ids`. A session keeps its cache between calls until it is released."""
        ...

    async def release(self, session: str) -> None:
        """The episode is over: its cache may go. Unknown sessions are fine."""
        ...

    async def sleep(self) -> None:
        """Give memory back while the learner works."""
        ...

    async def wake(self) -> None: ...


class CutShortError(EngineError):
    """The reply reached its most tokens before its end; `message` is what there is of it."""

    def __init__(self, message: Message) -> None:
        super().__init__("the reply was cut short by its length")
        self.message = message


class ChatModel(Protocol):
    """A teacher, or a model behind an endpoint that is evaluated."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        """CutShortError where `max_generate_length` ended it, if the model tells."""
        ...
