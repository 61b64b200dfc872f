"""Renderers turn messages into tokens and sampled tokens back into messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.pieces import Mark, PieceEncoder
from skyfleet.chat.tokenizer import Tokenizer, decode
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.chat.tool_calls.strict_json import encode
from skyfleet.errors import ModelError


class Renderer(Protocol):
    stop_token_ids: tuple[int, ...]

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The whole conversation so far, ending where the assistant begins to speak."""
        ...

    def join(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        """What follows a turn that ended in `last_token`, up to where the assistant speaks again.

        None says it cannot be joined exactly, and the conversation opens a new transcript.
        """
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        """What the sampled tokens say. Never raises on bad model output.

        `tools` tell a format without types which arguments are numbers.
        """
        ...

    def write(self, message: Message) -> list[int]:
        """The tokens the assistant would have to sample to say `message`, stop token included.

        By hand, calls that `parse` would hear as others are a ModelError.
        """
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """The tokens as a person reads them, special tokens included."""
        ...


class HandWrittenRenderer(ABC):
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        parse: ToolCallParser,
        marks: Sequence[Mark],
        stops: Sequence[Mark],
        closers: Sequence[Mark],
        close_turns: bool = True,
    ) -> None:
        """`marks` must be single tokens. A turn is over after any of `closers`; one that is not is
        given the first, unless `close_turns` is False. `stops` end a turn where they are known.
        """
        self._tokenizer, self._parse = tokenizer, parse
        self._encode = PieceEncoder(tokenizer)
        split = [mark for mark in marks if self._encode.token(mark) is None]
        if split:
            raise ModelError(
                f"the tokenizer splits {', '.join(split)}, which the format needs whole; "
                "use JinjaRenderer with the model's own template"
            )
        self.stop_token_ids: tuple[int, ...] = self._known(stops)
        self._closers, self._closer = self._known(closers), closers[0]
        self._close_turns = close_turns

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return self._encode((*self._opening(messages, tools), *self._prompt()))

    def join(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        """A turn cut by length or by a stop string is given its missing end."""
        glue = self._encode((self._closer, *self._following(messages), *self._prompt()))
        is_closed = last_token in self._closers or not self._close_turns
        return glue[1:] if is_closed else glue

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return self._parse(self.text(token_ids[:-1] if ended else token_ids), tools).message

    def write(self, message: Message) -> list[int]:
        token_ids = self._encode(self._speech(message))
        if message.tool_calls:
            heard = self.parse(token_ids, list(map(_spec_of, message.tool_calls)))
            if _calls(heard) != _calls(message):
                raise ModelError(
                    f"{self.text(token_ids)!r} would be read as the calls {_calls(heard)} where "
                    f"{_calls(message)} are meant; leave it out or use a format that can say it"
                )
        return token_ids

    def text(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)

    def _known(self, marks: Iterable[Mark]) -> tuple[int, ...]:
        tokens = map(self._encode.token, marks)
        return tuple(token for token in tokens if token is not None)

    @abstractmethod
    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterable[str]: ...

    @abstractmethod
    def _following(self, messages: Sequence[Message]) -> Iterable[str]:
        """What comes after the mark that ends an assistant's turn."""

    @abstractmethod
    def _prompt(self) -> Iterable[str]:
        """How an assistant's turn begins, up to where it is sampled."""

    @abstractmethod
    def _speech(self, message: Message) -> Iterable[str]:
        """What the assistant samples to say `message`, stop included."""


def _calls(message: Message) -> str:
    return encode([[call.name, dict(call.arguments)] for call in message.tool_calls])


def _spec_of(call: ToolCall) -> ToolSpec:
    """A tool whose schema types the arguments as they are."""
    kinds = {
        key: {"type": "string" if isinstance(value, str) else "object"}
        for key, value in call.arguments.items()
    }
    return ToolSpec(name=call.name, description="", parameters={"properties": kinds})
