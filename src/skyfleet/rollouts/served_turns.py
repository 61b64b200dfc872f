"""What a chat server returns, checked here: calls that it could not read, prompts that it renders differently."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.renderer import Renderer, TextParser
from skyfleet.chat.tool_calls.parser import assign_call_ids
from skyfleet.errors import SkyfleetError

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 60


class ServedTurns:
    """Checks the turns of one server, or of several that serve one model."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._reported: set[str] = set()
        self.n_different_prompts = 0
        """First prompts of episodes that the server rendered to other tokens."""

    def read_left_over(self, message: Message, tools: Sequence[ToolSpec]) -> Message:
        """The message with the calls, readable or malformed, that its server left in the text.

        vLLM's parsers return the whole text as content if one call in it cannot be read.
        """
        if not tools or not message.text or not isinstance(self._renderer, TextParser):
            return message
        left = self._renderer.parse_text(message.text, tools)
        if not (left.tool_calls or left.malformed_calls):
            return message
        return replace(
            message,
            content=left.content,
            reasoning=left.reasoning if message.reasoning is None else message.reasoning,
            tool_calls=assign_call_ids([*message.tool_calls, *left.tool_calls]),
            malformed_calls=(*message.malformed_calls, *left.malformed_calls),
            repaired_calls=message.repaired_calls + left.repaired_calls,
        )

    def compare_prompt(
        self, prompt: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> None:
        """Log once how the server's tokens of a first prompt differ from those rendered here."""
        try:
            here = self._renderer.render_prompt(messages, tools)
        except SkyfleetError as error:
            self._report(
                "not rendered", f"the prompt cannot be rendered here to compare it: {error}"
            )
            return
        if difference := self.describe_difference(here, prompt):
            self.n_different_prompts += 1
            self._report(
                difference.partition(":")[0],
                f"the server renders the first prompt to other tokens than this process: {difference}",
            )

    def compare_history(self, so_far: Sequence[int], prompt: Sequence[int]) -> None:
        """Log once how the server rewrote the turns before, so that a new transcript begins."""
        if difference := self.describe_difference(so_far, prompt[: len(so_far)]):
            self._report(
                f"history {difference.partition(':')[0]}",
                "the server renders earlier turns to other tokens than were sampled, so a new "
                f"transcript begins: {difference}",
            )

    def describe_difference(self, here: Sequence[int], there: Sequence[int]) -> str | None:
        """`KIND: at token N, here '...', there '...'`; None if the tokens are equal."""
        if list(here) == list(there):
            return None
        pairs = enumerate(zip(here, there, strict=False))
        first = next((n for n, (one, other) in pairs if one != other), min(len(here), len(there)))
        texts = [self._renderer.text(tokens) for tokens in (here, there)]
        shown = [
            self._renderer.text(tokens[first : first + _SHOWN_CHARACTERS])[:_SHOWN_CHARACTERS]
            for tokens in (here, there)
        ]
        why = _explain(texts[0], texts[1], shown, is_cut=len(here) == len(there))
        return (
            f"{why}: at token {first} of {len(here)} here and {len(there)} "
            f"there, {shown[0]!r} here and {shown[1]!r} there"
        )

    def _report(self, kind: str, sentence: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            logger.warning("native tool calling: %s", sentence)


def _explain(here: str, there: str, shown: Sequence[str], *, is_cut: bool) -> str:
    """`is_cut`: both are the same number of tokens, so that one text may end before the other."""
    is_part = is_cut and (here.startswith(there) or there.startswith(here))
    if here == there or is_part:
        return "the same text in other tokens, as another tokenizer or its merges write it"
    if "".join(here.split()) == "".join(there.split()):
        return "other white space"
    tags = [text for text in ("<tools>", "<tool_call>") if (text in here) != (text in there)]
    if tags:
        where = "here" if tags[0] in here else "there"
        return f"{tags[0]} is only {where}, so another chat template lists the tools"
    if any(mark in text for text in shown for mark in ('"', "{", "}")):
        return "JSON of tools or calls written differently (key order, spaces, escapes)"
    return "another chat template, system prompt or date"
