"""CharRenderer: every character is a token, so that a test can be read."""

from __future__ import annotations

import json
from collections.abc import Sequence

from skyfleet.chat.message import Message, ToolCall, ToolSpec

END = 0
"""The token that closes a turn."""


class CharRenderer:
    stop_token_ids: tuple[int, ...] = (END,)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return [token for message in messages for token in (*map(ord, message.text), END)]

    def render_continuation(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        return ([] if last_token == END else [END]) + self.render_prompt(messages, ())

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        text = self.text(token_ids)
        try:
            call = json.loads(text)
        except json.JSONDecodeError:
            return Message(role="assistant", content=text)
        return Message(role="assistant", tool_calls=(ToolCall(id="0", **call),))

    def render_completion(self, message: Message) -> list[int]:
        return [*map(ord, message.text), END]

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token != END)
