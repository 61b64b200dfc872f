"""The endpoints /v1/chat/completions and /v1/completions, from request body to response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from skyfleet.chat.tool_calls.parser import has_open_reasoning
from skyfleet.engines.openai_messages import parse_openai_message
from skyfleet.serving.generation import GenerateRequest
from skyfleet.serving.model_service import ModelService
from skyfleet.serving.requests import ChatCompletionRequest, CompletionRequest
from skyfleet.serving.responses import (
    build_chat_message,
    build_summary,
    chat_finish_reason,
    chat_token_fields,
    decode_completion,
    stream_chat_choices,
    stream_events,
    stream_text_choices,
    strip_stop,
    text_token_fields,
)

_PROMPT_TAIL_TOKENS = 8
"""The last tokens of a prompt, which include the template's generation prompt."""

Response = dict[str, Any] | AsyncIterator[str]


async def create_chat_completion(
    service: ModelService, raw: bytes, client_session: str | None
) -> Response:
    request = service.parse(raw, ChatCompletionRequest)
    messages = [message.to_message() for message in request.messages]
    tools = request.tool_specs
    prompt = service.token_cache.build_prompt(messages, tools, client=client_session)
    generate_requests = service.build_requests(
        request,
        [prompt.token_ids],
        request.max_completion_tokens or request.max_tokens,
        client_session=client_session,
        cached_session=prompt.session,
    )
    generate_requests = [
        service.guided_decoding.constrain(request, generated) for generated in generate_requests
    ]

    def answer(generated: GenerateRequest, token_ids: Sequence[int]) -> dict[str, Any]:
        """The response message; cached, so that its tokens are known if the client sends it back."""
        message = build_chat_message(request, service.renderer, token_ids)
        service.token_cache.store(
            [*messages, parse_openai_message(message, splits=False)],
            tools,
            [*generated.prompt, *token_ids],
            session=generated.session,
            client=client_session,
        )
        return message

    if request.stream:
        tail = service.renderer.text(prompt.token_ids[-_PROMPT_TAIL_TOKENS:])
        choices = [
            stream_chat_choices(
                request,
                service.renderer,
                service.generation.stream(generated),
                in_reasoning=has_open_reasoning(tail),
                generated=generated,
            )
            for generated in generate_requests
        ]
        return stream_events(
            service.response_fields("chatcmpl", "chat.completion.chunk"),
            request,
            prompt.token_ids,
            choices,
            on_end=lambda index, token_ids: answer(generate_requests[index], token_ids),
        )
    completions = await service.generate_all(generate_requests)
    response_choices = []
    pairs = zip(generate_requests, completions, strict=True)
    for index, (generated, completion) in enumerate(pairs):
        message = answer(generated, completion.token_ids)
        choice = {
            "index": index,
            "message": message,
            "finish_reason": chat_finish_reason(completion, message),
        }
        tokens = chat_token_fields(request, service.renderer, completion, generated)
        response_choices.append(choice | tokens)
    fields = service.response_fields("chatcmpl", "chat.completion")
    if request.return_token_ids:
        fields["prompt_token_ids"] = prompt.token_ids
    return {
        **fields,
        "choices": response_choices,
        **build_summary([prompt.token_ids], completions),
    }


async def create_completion(
    service: ModelService, raw: bytes, client_session: str | None
) -> Response:
    request = service.parse(raw, CompletionRequest)
    prompts = _tokenize_prompts(service, request.prompt)
    generate_requests = service.build_requests(
        request, prompts, request.max_tokens, client_session=client_session
    )
    fields = service.response_fields("cmpl", "text_completion")
    if request.stream:
        choices = [
            stream_text_choices(request, service.renderer, service.generation.stream(generated))
            for generated in generate_requests
        ]
        return stream_events(fields, request, prompts[0], choices)
    completions = await service.generate_all(generate_requests)
    response_choices = []
    pairs = zip(generate_requests, completions, strict=True)
    for index, (generated, completion) in enumerate(pairs):
        text = strip_stop(request, decode_completion(service.renderer, completion.token_ids))
        choice = {"index": index, "text": text, "finish_reason": completion.finish}
        choice |= text_token_fields(request, service.renderer, completion)
        if request.return_token_ids:
            choice["prompt_token_ids"] = generated.prompt
        response_choices.append(choice)
    return {**fields, "choices": response_choices, **build_summary(prompts, completions)}


def _tokenize_prompts(
    service: ModelService, prompt: str | list[int] | list[str] | list[list[int]]
) -> list[list[int]]:
    if isinstance(prompt, str):
        return [service.encode(prompt)]
    several: list[list[int]] = []
    single: list[int] = []
    for item in prompt:
        if isinstance(item, int):
            single.append(item)
        else:
            several.append(service.encode(item) if isinstance(item, str) else item)
    return several or [single]
