"""KimiK2Renderer: the format of Kimi K2, with thoughts and without.

The template of Kimi K2 Thinking drops the thoughts before the last answer; here they stay as they
were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from skyfleet.chat.call_ids import with_answered_ids
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.pieces import END_THINK, THINK, Mark
from skyfleet.chat.renderer import HandWrittenRenderer
from skyfleet.chat.text_only import text_only, thought_aloud
from skyfleet.chat.tokenizer import Tokenizer
from skyfleet.chat.tool_calls.kimi_k2 import parse_kimi_k2, write_kimi_k2
from skyfleet.chat.tools_section import function_schema

MIDDLE, END, END_OF_TEXT = Mark("<|im_middle|>"), Mark("<|im_end|>"), Mark("[EOS]")
SYSTEM, USER, ASSISTANT = Mark("<|im_system|>"), Mark("<|im_user|>"), Mark("<|im_assistant|>")

_SPEAKERS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": SYSTEM}


class KimiK2Renderer(HandWrittenRenderer):
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        default_system: str,
        thinks: bool,
        compact_tools: bool,
        close_turns: bool = True,
    ) -> None:
        """`thinks`: every turn begins with a thought. `compact_tools`: JSON without spaces."""
        super().__init__(
            tokenizer,
            parse=parse_kimi_k2,
            marks=(SYSTEM, USER, ASSISTANT, MIDDLE, END),
            stops=(END, END_OF_TEXT),
            closers=(END,),
            close_turns=close_turns,
        )
        self._default_system, self._thinks = default_system, thinks
        self._separators = (",", ":") if compact_tools else None

    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterator[str]:
        if tools:
            schemas = [function_schema(tool) for tool in tools]
            declared = json.dumps(schemas, ensure_ascii=False, separators=self._separators)
            yield from (SYSTEM, "tool_declare", MIDDLE, declared, END)
        if not messages or messages[0].role != "system":
            yield from (SYSTEM, "system", MIDDLE, self._default_system, END)
        yield from self._following(messages)

    def _following(self, messages: Sequence[Message]) -> Iterator[str]:
        for message, answered in with_answered_ids(messages):
            yield from (_SPEAKERS[message.role], message.role, MIDDLE)
            if message.role == "assistant":
                yield from self._speech(message)
            elif message.role == "tool":
                yield from (f"## Return of {answered}\n", text_only(message), END)
            else:
                yield from (text_only(message), END)

    def _prompt(self) -> tuple[str, ...]:
        return (ASSISTANT, "assistant", MIDDLE)

    def _speech(self, message: Message) -> Iterator[str]:
        if self._thinks:
            yield from (THINK, message.reasoning or "", END_THINK, text_only(message))
        else:
            yield thought_aloud(message)
        if message.tool_calls:
            yield from write_kimi_k2(message.tool_calls)
        yield from message.malformed_calls
        yield END
