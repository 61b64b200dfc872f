"""Context status: a line behind what the world says, on how much room the agent has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyfleet.chat.message import Message, Text, ToolSpec
from skyfleet.envs.context_tools import manage_context, n_turns

_CUTTING = manage_context.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextStatus:
    max_input_length: int
    max_turns: int
    warning_threshold: float
    """Share of `max_input_length`; from there on the line is a warning."""

    def told(
        self,
        messages: Sequence[Message],
        *,
        used_tokens: int,
        turns: int,
        tools: Sequence[ToolSpec],
    ) -> tuple[Message, ...]:
        """`messages`, the last of them with the line, after so many `turns`."""
        can_cut = any(tool.name == _CUTTING for tool in tools)
        advice = f"finish soon{f', or make room with {_CUTTING}' if can_cut else ''}"
        line = self._line(used_tokens, turns, advice)
        if not messages:
            return (Message(role="user", content=line),)
        *before, last = messages
        content = last.content
        if isinstance(content, str):
            return (*before, replace(last, content=f"{content}\n{line}"))
        return (*before, replace(last, content=(*content, Text(f"\n{line}"))))

    def _line(self, used_tokens: int, turns: int, advice: str) -> str:
        share = used_tokens / self.max_input_length
        warns = share >= self.warning_threshold
        return (
            f"[Context{' warning' if warns else ''}: {used_tokens:,} of {self.max_input_length:,} "
            f"tokens used ({share:.0%}), {n_turns(self.max_turns - turns)} left"
            f"{f'; {advice}' if warns else ''}]"
        )
