"""Turn messages into tokens: short ones at once, long ones in a thread beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from skyfleet.chat.message import Message, ToolSpec, UnsupportedMessageError
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.tokenizer import use_tokenizer_copies
from skyfleet.envs.message_validation import count_characters, format_call, format_tool
from skyfleet.errors import EnvError

LARGE_CHARACTERS = 65_536
"""Tokenizing a megabyte takes seconds; up to this size it takes less than a step of the engine."""
_CHUNK_CHARACTERS = 16_384
_CUT_TOKENS = 8
_MAX_CHARACTERS_PER_TOKEN = 8
"""Of tools that are worth tokenizing twice to know their tokens before they are rendered."""

T = TypeVar("T")


async def render(call: Callable[[], T], n_characters: int) -> T:
    """Call what renders messages of so many characters, in a thread if that is long.

    A message that the chat format cannot express is a failure of the environment that sent it.
    """
    try:
        if n_characters <= LARGE_CHARACTERS:
            return call()
        rendered = asyncio.get_running_loop().run_in_executor(_executor(), call)
        try:
            return await asyncio.shield(rendered)
        except asyncio.CancelledError:
            # The thread changes the conversation, so the episode cannot end before it has.
            await asyncio.wait({rendered})
            raise
    except UnsupportedMessageError as error:
        raise EnvError(str(error)) from error


def exceeds(
    renderer: Renderer,
    messages: Sequence[Message],
    max_tokens: int,
    tools: Sequence[ToolSpec] = (),
) -> bool:
    """Whether long messages and tools have more tokens than that, without tokenizing much more than
    that."""
    n_characters = count_characters(messages, tools)
    if n_characters <= LARGE_CHARACTERS:
        return False
    n_around = len(renderer.render_prompt([Message(role="user", content="")], ()))
    total = 0
    for text in _find_texts(messages, tools, n_characters, max_tokens):
        for start in range(0, len(text), _CHUNK_CHARACTERS):
            chunk = Message(role="user", content=text[start : start + _CHUNK_CHARACTERS])
            # A cut may split a token, so a chunk has a few more than in the whole text.
            total += len(renderer.render_prompt([chunk], ())) - n_around - _CUT_TOKENS
            if total > max_tokens:
                return True
    return False


def _find_texts(
    messages: Sequence[Message], tools: Sequence[ToolSpec], n_characters: int, max_tokens: int
) -> Iterator[str]:
    for message in messages:
        yield message.text
    if n_characters > _MAX_CHARACTERS_PER_TOKEN * max_tokens:
        for message in messages:
            yield from map(format_call, message.tool_calls)
        yield from map(format_tool, tools)


@cache
def _executor() -> ThreadPoolExecutor:
    # One thread: tokenizing takes 200 bytes of memory per character, so one text at a time.
    return ThreadPoolExecutor(1, "skyfleet tokenizer", initializer=use_tokenizer_copies)
