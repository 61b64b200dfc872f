"""Env: one episode of one task. Open it, step it, grade it, close it, discard it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.tasks.task import Grade, Task

DONE = "<done>"
"""What an agent says when it has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the agent finds when the episode starts."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the world answers."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float = 0.0
    """For this step only; the grade is separate."""
    info: Mapping[str, float] = field(default_factory=dict)
    keep_recent_turns: int | None = None
    """Of the agent's past only the opening, this turn and so many before it stay in its context;
    None keeps all."""
    opening: Observation | None = None
    """The agent goes on with these messages and tools alone, as if it began here."""


class Env(Protocol):
    async def reset(self) -> Observation: ...

    async def step(self, action: Message) -> Step: ...

    async def grade(self) -> Grade | None:
        """Judge the world as it stands. Called once, finished or cut short.

        None: it could not be judged, so the attempt counts in no mean and no loss.
        """
        ...

    async def close(self) -> None:
        """Give everything back. Safe to call twice."""
        ...


EnvFactory = Callable[[Task], Awaitable[Env]]
