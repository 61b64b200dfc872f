"""KimiK2Renderer: the chat format of Kimi K2 and Kimi K2 Thinking.

The template of Kimi K2 Thinking drops the reasoning before the last answer; this renderer keeps it
as sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from skyfleet.chat.call_ids import resolve_call_ids
from skyfleet.chat.message import Message, ToolSpec, extract_text, inline_reasoning
from skyfleet.chat.renderer import BuiltinRenderer, find_between
from skyfleet.chat.template import Template
from skyfleet.chat.template_checks import ANSWER, QUESTION, TEXT_DIALOGUE, TOOLS
from skyfleet.chat.tokenizer import END_THINK, THINK, SpecialToken, Tokenizer
from skyfleet.chat.tool_calls.kimi_k2 import parse_kimi_k2, write_kimi_k2
from skyfleet.chat.tool_prompt import to_openai_tool

MIDDLE, END, END_OF_TEXT = (
    SpecialToken("<|im_middle|>"),
    SpecialToken("<|im_end|>"),
    SpecialToken("[EOS]"),
)
SYSTEM, USER, ASSISTANT = (
    SpecialToken("<|im_system|>"),
    SpecialToken("<|im_user|>"),
    SpecialToken("<|im_assistant|>"),
)

_ROLE_TOKENS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": SYSTEM}


class KimiK2Renderer(BuiltinRenderer):
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        default_system: str,
        has_reasoning: bool,
        compact_tools: bool,
        close_turns: bool = True,
    ) -> None:
        """`has_reasoning`: every turn begins with reasoning. `compact_tools`: JSON without spaces."""
        super().__init__(
            tokenizer,
            parse=parse_kimi_k2,
            required_tokens=(SYSTEM, USER, ASSISTANT, MIDDLE, END),
            stop_tokens=(END, END_OF_TEXT),
            turn_ends=(END,),
            close_turns=close_turns,
        )
        self._default_system, self._has_reasoning = default_system, has_reasoning
        self._separators = (",", ":") if compact_tools else None

    @classmethod
    def from_template(cls, template: Template, *, close_turns: bool) -> KimiK2Renderer:
        prompt = template.render([QUESTION], TOOLS)
        system = find_between("<|im_system|>system<|im_middle|>", "<|im_end|>", prompt)
        return cls(
            template.tokenizer,
            default_system=system or "",
            has_reasoning=f"<think></think>{ANSWER.text}" in template.render(TEXT_DIALOGUE),
            compact_tools='{"type":"function"' in prompt,
            close_turns=close_turns,
        )

    def _render_conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Iterator[str]:
        if tools:
            schemas = [to_openai_tool(tool) for tool in tools]
            declared = json.dumps(schemas, ensure_ascii=False, separators=self._separators)
            yield from (SYSTEM, "tool_declare", MIDDLE, declared, END)
        if not messages or messages[0].role != "system":
            yield from (SYSTEM, "system", MIDDLE, self._default_system, END)
        yield from self._render_messages(messages)

    def _render_messages(self, messages: Sequence[Message]) -> Iterator[str]:
        for message, call_id in resolve_call_ids(messages):
            yield from (_ROLE_TOKENS[message.role], message.role, MIDDLE)
            if message.role == "assistant":
                yield from self._render_turn(message)
            elif message.role == "tool":
                yield from (f"## Return of {call_id}\n", extract_text(message), END)
            else:
                yield from (extract_text(message), END)

    def _generation_prompt(self) -> tuple[str, ...]:
        return (ASSISTANT, "assistant", MIDDLE)

    def _render_turn(self, message: Message) -> Iterator[str]:
        if self._has_reasoning:
            yield from (THINK, message.reasoning or "", END_THINK, extract_text(message))
        else:
            yield inline_reasoning(message)
        if message.tool_calls:
            yield from write_kimi_k2(message.tool_calls)
        yield from message.malformed_calls
        yield END
