"""History: the messages an agent has before it, whose opening is never cut."""

from __future__ import annotations

from skyfleet.chat.message import Message
from skyfleet.envs.env import Opening

CUT = "the agent's history was cut"


class History:
    def __init__(self, opening: Opening) -> None:
        self.messages: list[Message] = list(opening.messages)
        self._n_opening = len(opening.messages)

    def cut(self, *, keep_recent_turns: int) -> bool:
        """Leave the opening, the turn just spoken and so many before it; False: that is all."""
        spoken = [
            at
            for at, message in enumerate(self.messages)
            if at >= self._n_opening and message.role == "assistant"
        ]
        if len(spoken) <= keep_recent_turns + 1:
            return False
        del self.messages[self._n_opening : spoken[-1 - keep_recent_turns]]
        return True
