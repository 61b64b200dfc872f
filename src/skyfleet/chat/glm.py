"""GLMRenderer: the format of GLM-4.5 and GLM-4.6, whose turns end where the next speaker is named.

The template drops the thoughts before the last question; here they stay as they were sampled.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import groupby

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.pieces import END_THINK, THINK, Mark
from skyfleet.chat.renderer import HandWrittenRenderer
from skyfleet.chat.text_only import text_only
from skyfleet.chat.tokenizer import Tokenizer
from skyfleet.chat.tool_calls.glm import parse_glm, write_glm
from skyfleet.chat.tools_section import function_schema

logger = logging.getLogger(__name__)

BEGIN, END_OF_TEXT = (Mark("[gMASK]"), Mark("<sop>")), Mark("<|endoftext|>")
SYSTEM, USER, ASSISTANT = Mark("<|system|>"), Mark("<|user|>"), Mark("<|assistant|>")
OBSERVATION, DO_NOT_THINK = Mark("<|observation|>"), Mark("/nothink")

# GLM was trained on these words: not one character of them is ours to improve.
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


class GLMRenderer(HandWrittenRenderer):
    def __init__(self, tokenizer: Tokenizer, *, enable_thinking: bool = True) -> None:
        super().__init__(
            tokenizer,
            parse=parse_glm,
            marks=(*BEGIN, SYSTEM, USER, ASSISTANT, OBSERVATION),
            stops=(USER, OBSERVATION, END_OF_TEXT),
            closers=(USER, OBSERVATION),
        )
        self._thinks = enable_thinking

    def join(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        """The mark that ended the turn begins the next; None if another speaker was named."""
        glue = self._encode((*self._following(messages), *self._prompt()))
        if last_token not in self._closers:
            return glue
        if last_token == glue[0]:
            return glue[1:]
        named, answers = self.text([last_token]), self.text(glue[:1])
        logger.debug("a new transcript: the turn named %s and %s follows", named, answers)
        return None

    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterator[str]:
        yield from BEGIN
        if tools:
            yield from (SYSTEM, _BEFORE_TOOLS)
            for tool in tools:
                yield json.dumps(function_schema(tool), ensure_ascii=False) + "\n"
            *example, end = write_glm([_EXAMPLE])
            yield from (_AFTER_TOOLS, *example, "...\n", end)
        yield from self._following(messages)

    def _following(self, messages: Sequence[Message]) -> Iterator[str]:
        for role, run in groupby(messages, lambda message: message.role):
            if role == "tool":
                yield OBSERVATION
                yield from map(_tool_result, run)
                continue
            for message in run:
                if role == "assistant":
                    # What ends it is the mark that the next message begins with.
                    yield from (ASSISTANT, *self._thought(message), *_said(message))
                elif role == "system":
                    yield from (SYSTEM, "\n", text_only(message))
                else:
                    yield from (USER, "\n", *self._asked(text_only(message)))

    def _asked(self, text: str) -> tuple[str, ...]:
        return (text,) if self._thinks else (text.removesuffix(DO_NOT_THINK), DO_NOT_THINK)

    def _prompt(self) -> tuple[str, ...]:
        return (ASSISTANT,) if self._thinks else (ASSISTANT, "\n", THINK, END_THINK)

    def _speech(self, message: Message) -> Iterator[str]:
        if self._thinks:
            yield from self._thought(message)
        yield from _said(message)
        yield OBSERVATION if message.tool_calls else USER

    def _thought(self, message: Message) -> tuple[str, ...]:
        return ("\n", THINK, (message.reasoning or "").strip(), END_THINK)


def _said(message: Message) -> Iterator[str]:
    text = text_only(message).strip()
    if text:
        yield from ("\n", text)
    if message.tool_calls:
        yield from ("\n", *write_glm(message.tool_calls))
    for malformed in message.malformed_calls:
        yield from ("\n", malformed)


def _tool_result(message: Message) -> str:
    return f"\n<tool_response>\n{text_only(message)}\n</tool_response>"
