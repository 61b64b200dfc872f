"""Chatting: /v1/chat/completions, from a request's body to an answer or its events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from skyfleet.chat.tool_calls.parser import opens_thought
from skyfleet.engines.openai_messages import read_reply
from skyfleet.serving.model_service import Ask, Served
from skyfleet.serving.requests import ChatBody, CompletionBody
from skyfleet.serving.responses import (
    chat_choices,
    chat_finish,
    chat_message,
    chat_tokens,
    events,
    plain_text,
    text_choices,
    text_tokens,
    totals,
    without_stop,
)

_LAST = 8
"""Tokens of a prompt: what a template begins a turn with is among them."""


async def chat(
    served: Served, raw: bytes, session: str | None
) -> dict[str, Any] | AsyncIterator[str]:
    body = served.read(raw, ChatBody)
    messages, tools = [said.message() for said in body.messages], body.specs
    prompt = served.threads.prompt(messages, tools, client=session)
    asks = served.asks(
        body,
        [prompt.token_ids],
        body.max_completion_tokens or body.max_tokens,
        session=session,
        thread=prompt.session,
    )

    def answer(ask: Ask, token_ids: Sequence[int]) -> dict[str, Any]:
        """What the client is told; if it sends that back, its tokens are known."""
        message = chat_message(body, served.renderer, token_ids)
        talk = [*messages, read_reply(message, splits=False)]
        said = [*ask.prompt, *token_ids]
        served.threads.keep(talk, tools, said, session=ask.session, client=session)
        return message

    if body.stream:
        (ask,) = asks
        slices = served.speaking.slices(ask)
        thinks = opens_thought(served.renderer.text(ask.prompt[-_LAST:]))
        choices = chat_choices(body, served.renderer, slices, thinks=thinks)
        fields = served.fields("chatcmpl", "chat.completion.chunk")
        return events(fields, body, ask.prompt, choices, on_end=lambda said: answer(ask, said))
    completions = await served.whole(asks)
    told = []
    for index, (ask, said) in enumerate(zip(asks, completions, strict=True)):
        message = answer(ask, said.token_ids)
        choice = {"index": index, "message": message, "finish_reason": chat_finish(said, message)}
        told.append(choice | chat_tokens(body, served.renderer, said))
    fields = served.fields("chatcmpl", "chat.completion")
    if body.return_token_ids:
        fields["prompt_token_ids"] = prompt.token_ids
    return {**fields, "choices": told, **totals([prompt.token_ids], completions)}


async def complete(
    served: Served, raw: bytes, session: str | None
) -> dict[str, Any] | AsyncIterator[str]:
    body = served.read(raw, CompletionBody)
    prompts = _prompts(served, body.prompt)
    asks = served.asks(body, prompts, body.max_tokens, session=session)
    fields = served.fields("cmpl", "text_completion")
    if body.stream:
        (ask,) = asks
        choices = text_choices(body, served.renderer, served.speaking.slices(ask))
        return events(fields, body, ask.prompt, choices)
    completions = await served.whole(asks)
    told = []
    for index, (ask, said) in enumerate(zip(asks, completions, strict=True)):
        text = without_stop(body, plain_text(served.renderer, said.token_ids))
        choice = {"index": index, "text": text, "finish_reason": said.finish}
        choice |= text_tokens(body, served.renderer, said)
        if body.return_token_ids:
            choice["prompt_token_ids"] = ask.prompt
        told.append(choice)
    return {**fields, "choices": told, **totals(prompts, completions)}


def _prompts(
    served: Served, prompt: str | list[int] | list[str] | list[list[int]]
) -> list[list[int]]:
    if isinstance(prompt, str):
        return [served.encode(prompt)]
    several: list[list[int]] = []
    single: list[int] = []
    for one in prompt:
        if isinstance(one, int):
            single.append(one)
        else:
            several.append(served.encode(one) if isinstance(one, str) else one)
    return several or [single]
