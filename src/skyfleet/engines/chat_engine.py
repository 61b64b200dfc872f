"""ChatEngine: an engine that renders tools and reads calls itself, and still gives its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from skyfleet.chat.completion import Completion
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One turn, in words and in the very tokens."""

    message: Message
    prompt_token_ids: tuple[int, ...]
    """What the messages and tools became."""
    completion: Completion


class ChatEngine(Protocol):
    policy_version: int

    async def speak(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> Spoken:
        """The assistant's next message. A session keeps its cache until it is released."""
        ...

    async def release(self, session: str) -> None: ...
