"""Interfaces of inference engines: Engine (tokens in, tokens out) and ChatModel (messages only)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError

if TYPE_CHECKING:
    from skyfleet.models.decoder import Decoder


class Engine(Protocol):
    policy_version: int

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        """Continue `token_ids`. A session keeps its KV cache between calls until it is released."""
        ...

    async def release(self, session: str) -> None:
        """The episode is over, so its cache may be dropped. Unknown sessions are ignored."""
        ...

    async def sleep(self) -> None:
        """Free GPU memory while the learner works."""
        ...

    async def wake(self) -> None: ...


@runtime_checkable
class HasDecoder(Protocol):
    """An engine or a learner whose weights are in this process, such as EmbeddedEngine."""

    @property
    def decoder(self) -> Decoder: ...


class ReplyTruncatedError(EngineError):
    """The reply hit `max_generate_length` before its end; `message` is the truncated reply."""

    def __init__(self, message: Message) -> None:
        super().__init__("the reply was truncated by max_generate_length")
        self.message = message


class ChatModel(Protocol):
    """A model that returns messages without tokens: a teacher, or an endpoint under evaluation."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        """Raise `ReplyTruncatedError` if the server reports that `max_generate_length` ended the
        reply."""
        ...
