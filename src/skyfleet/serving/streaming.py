"""Streaming: a turn as server-sent events, each chunk in the shape of OpenAI's."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from skyfleet.chat.message import Message
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion
from skyfleet.engines.http_client import RefusedError
from skyfleet.errors import EngineError
from skyfleet.serving.errors import error_body
from skyfleet.serving.requests import Body, ChatBody, CompletionBody
from skyfleet.serving.responses import (
    chat_finish,
    chat_message,
    chat_tokens,
    plain_text,
    text_tokens,
    usage,
    without_stop,
)

Slices = AsyncIterator[tuple[Completion, bool]]
Choices = AsyncIterator[tuple[Completion, dict[str, Any]]]

_MARK_BEGUN = re.compile(r"\s*[<\[][^<\[]{0,31}\Z")
"""The end of a text that may be the first half of a mark."""


async def events(
    fields: Mapping[str, Any],
    body: Body,
    prompt: list[int],
    choices: Choices,
    *,
    on_end: Callable[[list[int]], object] = lambda _: None,
) -> AsyncIterator[str]:
    """A chunk a slice, then the usage if it was asked for; `on_end` is given all that was said."""
    said: list[int] = []
    try:
        async for completion, choice in choices:
            more: dict[str, Any] = {"policy_version": completion.policy_version}
            if body.return_token_ids and not said:
                more["prompt_token_ids"] = prompt
            said += completion.token_ids
            yield _event({**fields, "choices": [choice], **more})
        on_end(said)
        if body.stream_options.include_usage:
            yield _event({**fields, "choices": [], "usage": usage(len(prompt), len(said))})
    except EngineError as error:
        status = 400 if isinstance(error, RefusedError) else 500
        yield _event(error_body(str(error), status=status))
    yield "data: [DONE]\n\n"


async def text_choices(body: CompletionBody, renderer: Renderer, slices: Slices) -> Choices:
    said: list[int] = []
    sent = offset = 0
    async for part, is_last in slices:
        said += part.token_ids
        text = without_stop(body, plain_text(renderer, said), is_whole=is_last)
        choice = {
            "index": 0,
            "text": text[sent:],
            "finish_reason": part.finish if is_last else None,
        }
        yield part, choice | text_tokens(body, renderer, part, offset=offset)
        sent, offset = len(text), len(renderer.text(said))


async def chat_choices(
    body: ChatBody, renderer: Renderer, slices: Slices, *, thinks: bool = True
) -> Choices:
    """What may yet become something else waits for the last slice: all words where tools were offered.

    `thinks`: the prompt ends in a thought, and what is said before it ends may be part of that.
    """
    said: list[int] = []
    sent = {"content": "", "reasoning_content": ""}
    async for part, is_last in slices:
        delta: dict[str, Any] = {} if said else {"role": "assistant", "content": ""}
        said += part.token_ids
        finish = None
        message: dict[str, Any] = {}
        if is_last:
            message = chat_message(body, renderer, said)
            finish = chat_finish(part, message)
            if calls := message.get("tool_calls"):
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        elif not body.specs:
            message = _settled(body, renderer.parse(said), thinks=thinks)
        for key, before in sent.items():
            now = message.get(key) or ""
            more = now.removeprefix(before)
            # At the end rather twice than never.
            if more and (is_last or now.startswith(before)):
                delta[key], sent[key] = more, before + more
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        yield part, choice | chat_tokens(body, renderer, part)


def _settled(body: ChatBody, message: Message, *, thinks: bool) -> dict[str, str]:
    """What the whole turn will say too, whatever comes; nothing more once a call has begun."""
    if message.tool_calls or message.malformed_calls or (thinks and message.reasoning is None):
        return {}
    texts = {"content": message.text, "reasoning_content": message.reasoning or ""}
    return {
        key: without_stop(body, _MARK_BEGUN.sub("", text), is_whole=False)
        for key, text in texts.items()
    }


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
