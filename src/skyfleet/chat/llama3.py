"""Llama3Renderer: the chat format of Llama 3.1, 3.2 and 3.3, with tools in the first user message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from skyfleet.chat.message import Message, ToolSpec, extract_text, inline_reasoning
from skyfleet.chat.renderer import BuiltinRenderer, find_between
from skyfleet.chat.template import Template
from skyfleet.chat.template_checks import QUESTION
from skyfleet.chat.tokenizer import SpecialToken, Tokenizer
from skyfleet.chat.tool_calls.llama3_json import parse_llama3_json, write_llama3_json
from skyfleet.chat.tool_prompt import to_openai_tool
from skyfleet.errors import ModelError

BEGIN, END_OF_TEXT = SpecialToken("<|begin_of_text|>"), SpecialToken("<|end_of_text|>")
HEADER, END_HEADER = SpecialToken("<|start_header_id|>"), SpecialToken("<|end_header_id|>")
END, END_OF_MESSAGE = SpecialToken("<|eot_id|>"), SpecialToken("<|eom_id|>")

# Llama was trained on this exact text; do not change a character.
_BEFORE_TOOLS = (
    "Given the following functions, please respond with a JSON for a function call with its "
    "proper arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name '
    "and its value}.Do not use variables.\n\n"
)


class Llama3Renderer(BuiltinRenderer):
    def __init__(self, tokenizer: Tokenizer, *, date: str, close_turns: bool = True) -> None:
        """`date` is "Today Date" in the system message, such as 26 Jul 2024."""
        super().__init__(
            tokenizer,
            parse=parse_llama3_json,
            required_tokens=(BEGIN, HEADER, END_HEADER, END),
            stop_tokens=(END, END_OF_MESSAGE, END_OF_TEXT),
            turn_ends=(END, END_OF_MESSAGE),
            close_turns=close_turns,
        )
        self._dates = f"Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n"

    @classmethod
    def from_template(cls, template: Template, *, close_turns: bool) -> Llama3Renderer:
        # Read once: a run that lasts beyond midnight keeps the date it started with.
        date = find_between("Today Date: ", "\n\n", template.render([QUESTION]))
        return cls(template.tokenizer, date=date or "", close_turns=close_turns)

    def _render_conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Iterator[str]:
        system, rest = "", messages
        if messages and messages[0].role == "system":
            system, rest = extract_text(messages[0]).strip(), messages[1:]
        yield from (BEGIN, *_header("system"), "Environment: ipython\n" if tools else "")
        yield from (self._dates, system, END)
        if tools:
            if not rest or rest[0].role != "user":
                raise ModelError(
                    "Llama 3 lists the tools in the first user message, but the conversation does "
                    "not begin with a user message; let the environment send one first"
                )
            schemas = (
                json.dumps(to_openai_tool(tool), ensure_ascii=False, indent=4) for tool in tools
            )
            yield from (*_header("user"), _BEFORE_TOOLS, *(f"{schema}\n\n" for schema in schemas))
            yield from (extract_text(rest[0]).strip(), END)
            rest = rest[1:]
        yield from self._render_messages(rest)

    def _render_messages(self, messages: Sequence[Message]) -> Iterator[str]:
        for message in messages:
            if message.role == "assistant":
                yield from (*self._generation_prompt(), *self._render_turn(message))
            elif message.role == "tool":
                quoted = json.dumps(extract_text(message), ensure_ascii=False)
                yield from (*_header("ipython"), quoted, END)
            else:
                yield from (*_header(message.role), extract_text(message).strip(), END)

    def _generation_prompt(self) -> tuple[str, ...]:
        return _header("assistant")

    def _render_turn(self, message: Message) -> Iterator[str]:
        calls = "".join(write_llama3_json(message.tool_calls))
        parts = (inline_reasoning(message).strip(), calls, *message.malformed_calls)
        yield "\n".join(filter(None, parts))
        yield END


def _header(role: str) -> tuple[str, ...]:
    return (HEADER, role, END_HEADER, "\n\n")
