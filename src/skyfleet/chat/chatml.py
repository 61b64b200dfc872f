"""ChatMLRenderer: the format of Qwen2.5, Qwen3 and SmolLM2.

Qwen3's template drops the thoughts before the last question, so its past changes while the agent
works. Here they stay as they were sampled, with and without `enable_thinking`, and every turn
joins; on a conversation without thoughts the tokens are the template's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.pieces import END_THINK, THINK, Mark
from skyfleet.chat.renderer import HandWrittenRenderer
from skyfleet.chat.text_only import text_only
from skyfleet.chat.tokenizer import Tokenizer
from skyfleet.chat.tool_calls.hermes import parse_hermes, write_hermes
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.chat.tools_section import WriteTools, qwen_tools

START, END, END_OF_TEXT = Mark("<|im_start|>"), Mark("<|im_end|>"), Mark("<|endoftext|>")
NO_THOUGHT = (THINK, "\n\n", END_THINK, "\n\n")


class ChatMLRenderer(HandWrittenRenderer):
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        write_tools: WriteTools = qwen_tools,
        parse: ToolCallParser = parse_hermes,
        default_system: str | None = None,
        enable_thinking: bool | None = None,
        close_turns: bool = True,
    ) -> None:
        """`default_system` speaks when no system message does, as in Qwen2.5.

        `enable_thinking=False` hands the model an empty thought, as Qwen3's template does.
        """
        super().__init__(
            tokenizer,
            parse=parse,
            marks=(START, END),
            # A base model ends its texts, not its turns.
            stops=(END, END_OF_TEXT),
            closers=(END,),
            close_turns=close_turns,
        )
        self._write_tools, self._default_system = write_tools, default_system
        self._handed = NO_THOUGHT if enable_thinking is False else ()

    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterator[str]:
        system, rest = self._default_system, messages
        if messages and messages[0].role == "system":
            system, rest = text_only(messages[0]), messages[1:]
        if tools:
            section = self._write_tools(tools)
            system = section if system is None else f"{system}\n\n{section}"
        if system is not None:
            yield from (START, "system\n", system, END, "\n")
        yield from _turns(rest)

    def _following(self, messages: Sequence[Message]) -> Iterator[str]:
        yield "\n"
        yield from _turns(messages)

    def _prompt(self) -> tuple[str, ...]:
        return (START, "assistant\n", *self._handed)

    def _speech(self, message: Message) -> Iterator[str]:
        return _speech(message)


def _turns(messages: Sequence[Message]) -> Iterator[str]:
    for role, run in groupby(messages, lambda message: message.role):
        if role == "tool":
            yield from (START, "user\n", "\n".join(map(_tool_result, run)), END, "\n")
        elif role == "assistant":
            for message in run:
                yield from (START, "assistant\n", *_speech(message), "\n")
        else:
            for message in run:
                yield from (START, role, "\n", text_only(message), END, "\n")


def _tool_result(message: Message) -> str:
    return f"<tool_response>\n{text_only(message)}\n</tool_response>"


def _speech(message: Message) -> Iterator[str]:
    if message.reasoning is not None:
        yield from (THINK, "\n", message.reasoning, "\n", END_THINK, "\n\n")
    text = text_only(message)
    yield text
    if message.tool_calls:
        yield from ("\n" if text else "", *write_hermes(message.tool_calls))
    malformed = "\n".join(message.malformed_calls)
    yield f"\n{malformed}" if malformed and (text or message.tool_calls) else malformed
    yield END
