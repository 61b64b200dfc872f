"""Chatting: /v1/chat/completions, from a request's body to an answer or its events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from skyfleet.chat.tool_calls.parser import has_open_reasoning
from skyfleet.engines.openai_messages import read_reply
from skyfleet.serving.model_service import GenerateRequest, ModelService
from skyfleet.serving.requests import ChatCompletionRequest, CompletionRequest
from skyfleet.serving.responses import (
    stream_chat_choices,
    chat_finish_reason,
    build_chat_message,
    chat_token_fields,
    stream_events,
    decode_completion,
    stream_text_choices,
    text_token_fields,
    summarize,
    strip_stop,
)

_LAST = 8
"""Tokens of a prompt: what a template begins a turn with is among them."""


async def chat(
    served: ModelService, raw: bytes, session: str | None
) -> dict[str, Any] | AsyncIterator[str]:
    body = served.read(raw, ChatCompletionRequest)
    messages, tools = [said.message() for said in body.messages], body.tool_specs
    prompt = served.token_cache.prompt(messages, tools, client=session)
    build_requests = served.build_requests(
        body,
        [prompt.token_ids],
        body.max_completion_tokens or body.max_tokens,
        session=session,
        thread=prompt.session,
    )

    def answer(ask: GenerateRequest, token_ids: Sequence[int]) -> dict[str, Any]:
        """What the client is told; if it sends that back, its tokens are known."""
        message = build_chat_message(body, served.renderer, token_ids)
        talk = [*messages, read_reply(message, splits=False)]
        said = [*ask.prompt, *token_ids]
        served.token_cache.keep(talk, tools, said, session=ask.session, client=session)
        return message

    if body.stream:
        (ask,) = build_requests
        slices = served.generation.slices(ask)
        in_reasoning = has_open_reasoning(served.renderer.text(ask.prompt[-_LAST:]))
        choices = stream_chat_choices(body, served.renderer, slices, in_reasoning=in_reasoning)
        fields = served.fields("chatcmpl", "chat.completion.chunk")
        return stream_events(fields, body, ask.prompt, choices, on_end=lambda said: answer(ask, said))
    completions = await served.whole(build_requests)
    told = []
    for index, (ask, said) in enumerate(zip(build_requests, completions, strict=True)):
        message = answer(ask, said.token_ids)
        choice = {"index": index, "message": message, "finish_reason": chat_finish_reason(said, message)}
        told.append(choice | chat_token_fields(body, served.renderer, said))
    fields = served.fields("chatcmpl", "chat.completion")
    if body.return_token_ids:
        fields["prompt_token_ids"] = prompt.token_ids
    return {**fields, "choices": told, **summarize([prompt.token_ids], completions)}


async def complete(
    served: ModelService, raw: bytes, session: str | None
) -> dict[str, Any] | AsyncIterator[str]:
    body = served.read(raw, CompletionRequest)
    prompts = _prompts(served, body.prompt)
    build_requests = served.build_requests(body, prompts, body.max_tokens, session=session)
    fields = served.fields("cmpl", "text_completion")
    if body.stream:
        (ask,) = build_requests
        choices = stream_text_choices(body, served.renderer, served.generation.slices(ask))
        return stream_events(fields, body, ask.prompt, choices)
    completions = await served.whole(build_requests)
    told = []
    for index, (ask, said) in enumerate(zip(build_requests, completions, strict=True)):
        text = strip_stop(body, decode_completion(served.renderer, said.token_ids))
        choice = {"index": index, "text": text, "finish_reason": said.finish}
        choice |= text_token_fields(body, served.renderer, said)
        if body.return_token_ids:
            choice["prompt_token_ids"] = ask.prompt
        told.append(choice)
    return {**fields, "choices": told, **summarize(prompts, completions)}


def _prompts(
    served: ModelService, prompt: str | list[int] | list[str] | list[list[int]]
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
