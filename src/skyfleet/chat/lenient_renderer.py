"""LenientRenderer: a renderer whose `parse` also recovers calls that strict parsing leaves out."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.renderer import Renderer, TextParser
from skyfleet.chat.tool_calls.lenient import repair_message


class LenientRenderer:
    """Renders as `renderer` does: prompts, continuations and demonstrations stay in its own format."""

    def __init__(self, renderer: Renderer, *, log: bool = False) -> None:
        """`log` writes every repaired call to the log at level INFO."""
        self._renderer, self._log = renderer, log
        self.stop_token_ids = renderer.stop_token_ids

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return self._renderer.render_prompt(messages, tools)

    def render_continuation(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        return self._renderer.render_continuation(last_token, messages)

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        return repair_message(self._renderer.parse(token_ids, tools), tools, log=self._log)

    def parse_text(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        if not isinstance(self._renderer, TextParser):
            return Message(role="assistant", content=text)
        return repair_message(self._renderer.parse_text(text, tools), tools, log=self._log)

    def render_completion(self, message: Message) -> list[int]:
        return self._renderer.render_completion(message)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._renderer.text(token_ids)
