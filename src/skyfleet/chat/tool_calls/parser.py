"""ToolCallParser: what a model's text says, does and thinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from skyfleet.chat.message import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    content: str
    reasoning: str | None
    """None: it did not think. Empty: it thought nothing, as Qwen3 does when told not to think."""
    tool_calls: tuple[ToolCall, ...]
    malformed_calls: tuple[str, ...]
    repaired_calls: int = 0
    """How many of `tool_calls` were given the closing braces they lacked."""

    @property
    def message(self) -> Message:
        return Message(
            role="assistant",
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            malformed_calls=self.malformed_calls,
        )


class ToolCallParser(Protocol):
    def __call__(self, text: str, /) -> Parsed:
        """Every call is parsed or counted, never guessed. Never raises."""
        ...
