"""GLMRenderer: the chat format of GLM-4.5 and GLM-4.6, where the next role token ends a turn.

The template drops the reasoning before the last user message; this renderer keeps it as sampled.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import groupby

from skyfleet.chat.message import Message, ToolCall, ToolSpec, extract_text
from skyfleet.chat.renderer import BuiltinRenderer
from skyfleet.chat.template import Template
from skyfleet.chat.template_checks import QUESTION
from skyfleet.chat.tokenizer import END_THINK, THINK, SpecialToken, Tokenizer
from skyfleet.chat.tool_calls.glm import parse_glm, write_glm
from skyfleet.chat.tool_prompt import to_openai_tool

logger = logging.getLogger(__name__)

BEGIN, END_OF_TEXT = (SpecialToken("[gMASK]"), SpecialToken("<sop>")), SpecialToken("<|endoftext|>")
SYSTEM, USER, ASSISTANT = (
    SpecialToken("<|system|>"),
    SpecialToken("<|user|>"),
    SpecialToken("<|assistant|>"),
)
OBSERVATION, DO_NOT_THINK = SpecialToken("<|observation|>"), SpecialToken("/nothink")

# GLM was trained on this exact text; do not change a character.
_BEFORE_TOOLS = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER_TOOLS = (
    "</tools>\n\n"
    "For each function call, output the function name and arguments within the following XML "
    "format:\n"
)
_EXAMPLE = ToolCall(
    id="",
    name="{function-name}",
    arguments={"{arg-key-1}": "{arg-value-1}", "{arg-key-2}": "{arg-value-2}"},
)


class GLMRenderer(BuiltinRenderer):
    def __init__(self, tokenizer: Tokenizer, *, enable_thinking: bool = True) -> None:
        super().__init__(
            tokenizer,
            parse=parse_glm,
            required_tokens=(*BEGIN, SYSTEM, USER, ASSISTANT, OBSERVATION),
            stop_tokens=(USER, OBSERVATION, END_OF_TEXT),
            turn_ends=(USER, OBSERVATION),
        )
        self._enable_thinking = enable_thinking

    @classmethod
    def from_template(cls, template: Template, *, close_turns: bool) -> GLMRenderer:
        # `close_turns` has no effect: the token that ends a turn begins the next one.
        enable_thinking = not template.render([QUESTION]).endswith("</think>")
        return cls(template.tokenizer, enable_thinking=enable_thinking)

    def render_continuation(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        """None if the turn ended with another role token than the next message begins with."""
        pieces = (*self._render_messages(messages), *self._generation_prompt())
        token_ids = self._encode(pieces)
        if last_token not in self._turn_end_ids:
            return token_ids
        if last_token == token_ids[0]:
            return token_ids[1:]
        sampled, expected = self.text([last_token]), self.text(token_ids[:1])
        logger.debug("new transcript: the turn ended with %s, %s follows", sampled, expected)
        return None

    def _render_conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Iterator[str]:
        yield from BEGIN
        if tools:
            yield from (SYSTEM, _BEFORE_TOOLS)
            for tool in tools:
                yield json.dumps(to_openai_tool(tool), ensure_ascii=False) + "\n"
            *example, end = write_glm([_EXAMPLE])
            yield from (_AFTER_TOOLS, *example, "...\n", end)
        yield from self._render_messages(messages)

    def _render_messages(self, messages: Sequence[Message]) -> Iterator[str]:
        for role, run in groupby(messages, lambda message: message.role):
            if role == "tool":
                yield OBSERVATION
                yield from map(_render_result, run)
                continue
            for message in run:
                if role == "assistant":
                    # The first token of the next message ends the turn.
                    yield from (ASSISTANT, *self._reasoning(message), *_render_body(message))
                elif role == "system":
                    yield from (SYSTEM, "\n", extract_text(message))
                else:
                    yield from (USER, "\n", *self._user_text(extract_text(message)))

    def _user_text(self, text: str) -> tuple[str, ...]:
        if self._enable_thinking:
            return (text,)
        return (text.removesuffix(DO_NOT_THINK), DO_NOT_THINK)

    def _generation_prompt(self) -> tuple[str, ...]:
        return (ASSISTANT,) if self._enable_thinking else (ASSISTANT, "\n", THINK, END_THINK)

    def _render_turn(self, message: Message) -> Iterator[str]:
        if self._enable_thinking:
            yield from self._reasoning(message)
        yield from _render_body(message)
        yield OBSERVATION if message.tool_calls else USER

    def _reasoning(self, message: Message) -> tuple[str, ...]:
        return ("\n", THINK, (message.reasoning or "").strip(), END_THINK)


def _render_body(message: Message) -> Iterator[str]:
    text = extract_text(message).strip()
    if text:
        yield from ("\n", text)
    if message.tool_calls:
        yield from ("\n", *write_glm(message.tool_calls))
    for malformed in message.malformed_calls:
        yield from ("\n", malformed)


def _render_result(message: Message) -> str:
    return f"\n<tool_response>\n{extract_text(message)}\n</tool_response>"
