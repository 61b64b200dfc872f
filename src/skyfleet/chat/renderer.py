"""Renderer: messages to tokens, and sampled tokens back to a message."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.tokenizer import PromptEncoder, SpecialToken, Tokenizer, decode
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.chat.tool_calls.strict_json import encode
from skyfleet.errors import ModelError


class Renderer(Protocol):
    stop_token_ids: tuple[int, ...]

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Tokens of the whole conversation, ending with the generation prompt."""
        ...

    def render_continuation(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        """Tokens that follow a sampled turn ending in `last_token`, up to the next generation prompt.

        None if the conversation cannot be continued token by token; the caller then starts a new
        transcript.
        """
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        """The message that the sampled tokens encode. Never raises on bad model output.

        `tools` supply argument types for formats that write arguments as bare text.
        """
        ...

    def render_completion(self, message: Message) -> list[int]:
        """The tokens that the assistant would have to sample for `message`, stop token included.

        Built-in renderers raise ModelError if `parse` would return other tool calls.
        """
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode the tokens, special tokens included."""
        ...


@runtime_checkable
class TextParser(Protocol):
    """A renderer that also parses text, such as what a server left of a turn."""

    def parse_text(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message: ...


class BuiltinRenderer(ABC):
    """Base class of the chat formats that are implemented in Python instead of Jinja.

    No text merges with a special token, so the text before and after one can be tokenized alone and
    has the same ids as in the whole conversation. A sampled turn ends with a special token, or gets
    one, and the conversation continues from there. Sampled tokens are never rendered again: where a
    template would drop old reasoning, the reasoning stays.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        parse: ToolCallParser,
        required_tokens: Sequence[SpecialToken],
        stop_tokens: Sequence[SpecialToken],
        turn_ends: Sequence[SpecialToken],
        close_turns: bool = True,
    ) -> None:
        """The tokenizer must have every one of `required_tokens` as a single token.

        A turn that ends with none of `turn_ends` gets the first of them, unless `close_turns` is
        False. Those of `stop_tokens` that the tokenizer has stop generation.
        """
        self._tokenizer, self._parse = tokenizer, parse
        self._encode = PromptEncoder(tokenizer)
        split = [token for token in required_tokens if self._encode.token(token) is None]
        if split:
            raise ModelError(
                f"the tokenizer splits {', '.join(split)} into several tokens, but the chat format "
                "needs one token each; use JinjaRenderer with the model's own template"
            )
        self.stop_token_ids: tuple[int, ...] = self._known_ids(stop_tokens)
        self._turn_end_ids, self._turn_end = self._known_ids(turn_ends), turn_ends[0]
        self._close_turns = close_turns

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        pieces = (*self._render_conversation(messages, tools), *self._generation_prompt())
        return self._encode(pieces)

    def render_continuation(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        """A turn that was cut by length or by a stop string gets its missing end token."""
        pieces = (self._turn_end, *self._render_messages(messages), *self._generation_prompt())
        token_ids = self._encode(pieces)
        is_closed = last_token in self._turn_end_ids or not self._close_turns
        return token_ids[1:] if is_closed else token_ids

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        stopped = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return self.parse_text(self.text(token_ids[:-1] if stopped else token_ids), tools)

    def parse_text(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        return self._parse(text, tools).message

    def render_completion(self, message: Message) -> list[int]:
        token_ids = self._encode(self._render_turn(message))
        if message.tool_calls:
            parsed = self.parse(token_ids, list(map(_infer_spec, message.tool_calls)))
            if _dump_calls(parsed) != _dump_calls(message):
                raise ModelError(
                    f"{self.text(token_ids)!r} parses as the tool calls {_dump_calls(parsed)} "
                    f"instead of {_dump_calls(message)}; leave the message out or use a chat "
                    "format that can express it"
                )
        return token_ids

    def text(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)

    def _known_ids(self, tokens: Iterable[SpecialToken]) -> tuple[int, ...]:
        ids = map(self._encode.token, tokens)
        return tuple(token_id for token_id in ids if token_id is not None)

    @abstractmethod
    def _render_conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Iterable[str]:
        """The conversation from its first token, with the tools."""

    @abstractmethod
    def _render_messages(self, messages: Sequence[Message]) -> Iterable[str]:
        """What follows the special token that ends an assistant turn."""

    @abstractmethod
    def _generation_prompt(self) -> Iterable[str]:
        """The beginning of an assistant turn, up to the first sampled token."""

    @abstractmethod
    def _render_turn(self, message: Message) -> Iterable[str]:
        """What the assistant samples for `message`, stop token included."""


def find_between(before: str, after: str, text: str) -> str | None:
    """The shortest text between `before` and `after`."""
    found = re.search(f"{re.escape(before)}(.*?){re.escape(after)}", text, re.DOTALL)
    return found[1] if found else None


def _dump_calls(message: Message) -> str:
    return encode([[call.name, dict(call.arguments)] for call in message.tool_calls])


def _infer_spec(call: ToolCall) -> ToolSpec:
    """A tool whose schema has the types of the call's arguments."""
    types = {
        key: {"type": "string" if isinstance(value, str) else "object"}
        for key, value in call.arguments.items()
    }
    return ToolSpec(name=call.name, description="", parameters={"properties": types})
