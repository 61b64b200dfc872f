"""Streaming: a turn as server-sent events, each chunk in the shape of OpenAI's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from skyfleet.chat.completion import Completion
from skyfleet.chat.renderer import Renderer
from skyfleet.engines.posting import RefusedError
from skyfleet.errors import EngineError
from skyfleet.serving.answers import (
    chat_finish,
    chat_message,
    chat_tokens,
    plain_text,
    text_tokens,
    usage,
    without_stop,
)
from skyfleet.serving.bodies import Body, ChatBody, CompletionBody
from skyfleet.serving.refusal import error_body

Slices = AsyncIterator[tuple[Completion, bool]]
Choices = AsyncIterator[tuple[Completion, dict[str, Any]]]


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


async def chat_choices(body: ChatBody, renderer: Renderer, slices: Slices) -> Choices:
    """Where tools were offered, words wait for the last slice: they may yet become a call."""
    said: list[int] = []
    sent = {"content": "", "reasoning_content": ""}
    async for part, is_last in slices:
        delta: dict[str, Any] = {} if said else {"role": "assistant", "content": ""}
        said += part.token_ids
        finish = None
        if is_last or not body.specs:
            message = chat_message(body, renderer, said, is_whole=is_last)
            for key, before in sent.items():
                now = message.get(key) or ""
                if len(now) > len(before) and now.startswith(before):
                    delta[key], sent[key] = now[len(before) :], now
            if is_last:
                finish = chat_finish(part, message)
                if calls := message.get("tool_calls"):
                    delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        yield part, choice | chat_tokens(body, renderer, part)


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
