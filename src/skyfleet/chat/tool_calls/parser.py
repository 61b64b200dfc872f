"""ToolCallParser: what a model's text says, does and thinks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from skyfleet.chat.message import Message, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    content: str
    reasoning: str | None
    """None: it did not think. Empty: it thought nothing, as Qwen3 does when told not to think."""
    tool_calls: tuple[ToolCall, ...]
    malformed_calls: tuple[str, ...]
    repaired_calls: int = 0
    """How many of `tool_calls` were given the closing brackets they lacked."""

    @property
    def message(self) -> Message:
        return Message(
            role="assistant",
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            malformed_calls=self.malformed_calls,
            repaired_calls=self.repaired_calls,
        )


class ToolCallParser(Protocol):
    def __call__(self, text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Every call is parsed or counted, never guessed. Never raises.

        `tools` type the arguments of formats that write them as bare text; without them such an
        argument is a string.
        """
        ...


class ToolCallWriter(Protocol):
    def __call__(self, calls: Sequence[ToolCall], /) -> Iterable[str]:
        """The calls as the model would say them, its marks as `Mark`s; joined it is the text."""
        ...
