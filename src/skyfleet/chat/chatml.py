"""ChatMLRenderer: Qwen's chat format, written by hand so that every turn can be joined.

`<|im_end|>` is one token and no text merges with it, so what stands before it and what stands
after it tokenise alone to the ids they have in the whole. Each sampled turn ends in that token,
or is given it; from there the conversation goes on, and sampled tokens are never rendered again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.text_only import text_only
from skyfleet.chat.tokenizer import Tokenizer, decode, encode, single_token
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.chat.tools_section import WriteTools, qwen_tools
from skyfleet.errors import ModelError

START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
NO_THOUGHT = "<think>\n\n</think>\n\n"


class ChatMLRenderer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        write_tools: WriteTools = qwen_tools,
        parse: ToolCallParser = parse_hermes,
        default_system: str | None = None,
        enable_thinking: bool | None = None,
    ) -> None:
        """`default_system` speaks when no system message does, as in Qwen2.5.

        `enable_thinking=False` hands the model an empty thought, as Qwen3's template does.
        """
        end = single_token(tokenizer, END)
        if end is None or single_token(tokenizer, START) is None:
            raise ModelError(
                f"the tokenizer splits {START} or {END}, which ChatML needs whole; "
                "use JinjaRenderer with the model's own template"
            )
        # A base model ends its texts, not its turns.
        end_of_text = single_token(tokenizer, END_OF_TEXT)
        self.stop_token_ids: tuple[int, ...] = (end,) if end_of_text is None else (end, end_of_text)
        self._end = end
        self._tokenizer = tokenizer
        self._write_tools = write_tools
        self._parse = parse
        self._default_system = default_system
        self._prompt = f"{START}assistant\n{NO_THOUGHT if enable_thinking is False else ''}"

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        system, rest = self._default_system, messages
        if messages and messages[0].role == "system":
            system, rest = text_only(messages[0]), messages[1:]
        if tools:
            section = self._write_tools(tools)
            system = section if system is None else f"{system}\n\n{section}"
        opening = "" if system is None else _turn("system", system)
        return encode(self._tokenizer, opening + _turns(rest) + self._prompt)

    def join(self, last_token: int, messages: Sequence[Message]) -> list[int]:
        """Always joins: a turn cut by length or by a stop string is given its missing end."""
        glue = encode(self._tokenizer, f"{END}\n{_turns(messages)}{self._prompt}")
        return glue[1:] if last_token == self._end else glue

    def parse(self, token_ids: Sequence[int]) -> Message:
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return self._parse(self.text(token_ids[:-1] if ended else token_ids)).message

    def write(self, message: Message) -> list[int]:
        return encode(self._tokenizer, _assistant(message) + END)

    def text(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)


def _turns(messages: Sequence[Message]) -> str:
    turns: list[str] = []
    for are_results, run in groupby(messages, lambda message: message.role == "tool"):
        if are_results:
            turns.append(_turn("user", "\n".join(map(_tool_result, run))))
        else:
            turns.extend(_turn(message.role, _body(message)) for message in run)
    return "".join(turns)


def _turn(role: str, body: str) -> str:
    return f"{START}{role}\n{body}{END}\n"


def _body(message: Message) -> str:
    return _assistant(message) if message.role == "assistant" else text_only(message)


def _tool_result(message: Message) -> str:
    return f"<tool_response>\n{text_only(message)}\n</tool_response>"


def _assistant(message: Message) -> str:
    parts = (text_only(message), *map(_call, message.tool_calls), *message.malformed_calls)
    speech = "\n".join(filter(None, parts))
    if message.reasoning is None:
        return speech
    return f"<think>\n{message.reasoning}\n</think>\n\n{speech}"


def _call(call: ToolCall) -> str:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
