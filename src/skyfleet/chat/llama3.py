"""Llama3Renderer: the format of Llama 3.1, 3.2 and 3.3, tools shown in the first question."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.pieces import Mark
from skyfleet.chat.renderer import HandWrittenRenderer
from skyfleet.chat.text_only import text_only, thought_aloud
from skyfleet.chat.tokenizer import Tokenizer
from skyfleet.chat.tool_calls.llama3_json import parse_llama3_json, write_llama3_json
from skyfleet.chat.tools_section import function_schema
from skyfleet.errors import ModelError

BEGIN, END_OF_TEXT = Mark("<|begin_of_text|>"), Mark("<|end_of_text|>")
HEADER, END_HEADER = Mark("<|start_header_id|>"), Mark("<|end_header_id|>")
END, END_OF_MESSAGE = Mark("<|eot_id|>"), Mark("<|eom_id|>")

# Llama was trained on these words: not one character of them is ours to improve.
_BEFORE_TOOLS = (
    "Given the following functions, please respond with a JSON for a function call with its "
    "proper arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name '
    "and its value}.Do not use variables.\n\n"
)


class Llama3Renderer(HandWrittenRenderer):
    def __init__(self, tokenizer: Tokenizer, *, date: str, close_turns: bool = True) -> None:
        """`date` is the day the system message calls today, such as 26 Jul 2024."""
        super().__init__(
            tokenizer,
            parse=parse_llama3_json,
            marks=(BEGIN, HEADER, END_HEADER, END),
            stops=(END, END_OF_MESSAGE, END_OF_TEXT),
            closers=(END, END_OF_MESSAGE),
            close_turns=close_turns,
        )
        self._dates = f"Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n"

    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterator[str]:
        system, rest = "", messages
        if messages and messages[0].role == "system":
            system, rest = text_only(messages[0]).strip(), messages[1:]
        yield from (BEGIN, *_header("system"), "Environment: ipython\n" if tools else "")
        yield from (self._dates, system, END)
        if tools:
            if not rest or rest[0].role != "user":
                raise ModelError(
                    "Llama 3 shows its tools in the first user message, and the conversation "
                    "does not begin with one; let the env ask first"
                )
            schemas = (
                json.dumps(function_schema(tool), ensure_ascii=False, indent=4) for tool in tools
            )
            yield from (*_header("user"), _BEFORE_TOOLS, *(f"{schema}\n\n" for schema in schemas))
            yield from (text_only(rest[0]).strip(), END)
            rest = rest[1:]
        yield from self._following(rest)

    def _following(self, messages: Sequence[Message]) -> Iterator[str]:
        for message in messages:
            if message.role == "assistant":
                yield from (*self._prompt(), *self._speech(message))
            elif message.role == "tool":
                quoted = json.dumps(text_only(message), ensure_ascii=False)
                yield from (*_header("ipython"), quoted, END)
            else:
                yield from (*_header(message.role), text_only(message).strip(), END)

    def _prompt(self) -> tuple[str, ...]:
        return _header("assistant")

    def _speech(self, message: Message) -> Iterator[str]:
        calls = "".join(write_llama3_json(message.tool_calls))
        parts = (thought_aloud(message).strip(), calls, *message.malformed_calls)
        yield "\n".join(filter(None, parts))
        yield END


def _header(role: str) -> tuple[str, ...]:
    return (HEADER, role, END_HEADER, "\n\n")
