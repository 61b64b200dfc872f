"""History: the messages an agent has before it, whose opening is never cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.envs.env import Opening

CUT = "the agent's history was cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Opening):
    """An opening and, behind it, turns that were played before."""

    begins: tuple[int, ...]
    """Where in `messages` each turn begins that is still in view."""
    n_turns: int
    """All that were played, in view or not."""


class History:
    def __init__(self, opening: Opening) -> None:
        self.messages: list[Message] = list(opening.messages)
        self.n_turns = 0
        # Not told by their role: an env may speak as the assistant too.
        self._begins: list[int] = []
        if isinstance(opening, Resumed):
            self.n_turns, self._begins = opening.n_turns, list(opening.begins)

    def say(self, message: Message) -> None:
        """Begin a turn."""
        self._begins.append(len(self.messages))
        self.n_turns += 1
        self.messages.append(message)

    def cut(self, *, keep_recent_turns: int) -> bool:
        """Leave the opening, the turn just spoken and so many before it; False: that is all."""
        kept = self._begins[-1 - keep_recent_turns :]
        if len(kept) == len(self._begins):
            return False
        first = self._begins[0]
        del self.messages[first : kept[0]]
        self._begins = [at - kept[0] + first for at in kept]
        return True

    def begun(self, opening: Opening) -> History:
        """Another, with nothing of this one but how many turns there were."""
        history = History(opening)
        history.n_turns += self.n_turns
        return history

    def resumed(self, tools: Sequence[ToolSpec]) -> Resumed:
        return Resumed(
            messages=tuple(self.messages),
            tools=tuple(tools),
            begins=tuple(self._begins),
            n_turns=self.n_turns,
        )
