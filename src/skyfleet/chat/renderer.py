"""Renderer: messages to tokens, and sampled tokens back to a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skyfleet.chat.message import Message, ToolSpec


class Renderer(Protocol):
    stop_token_ids: tuple[int, ...]

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The whole conversation so far, ending where the assistant begins to speak."""
        ...

    def join(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        """What follows a turn that ended in `last_token`, up to where the assistant speaks again.

        None says it cannot be joined exactly, and the conversation opens a new transcript.
        """
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        """What the sampled tokens say. Never raises on bad model output.

        `tools` tell a format without types which arguments are numbers.
        """
        ...

    def write(self, message: Message) -> list[int]:
        """The tokens the assistant would have to sample to say `message`, stop token included.

        By hand, calls that `parse` would hear as others are a ModelError.
        """
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """The tokens as a person reads them, special tokens included."""
        ...
