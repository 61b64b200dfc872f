"""Build OpenAI API responses, whole or as server-sent events, with vLLM's fields for tokens."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

from skyfleet.chat.call_ids import format_call_id
from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.tool_calls.parser import split_reasoning
from skyfleet.chat.transcript import Completion
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.openai_messages import to_openai_message
from skyfleet.errors import EngineError
from skyfleet.serving.generation import GenerateRequest
from skyfleet.serving.guided_decoding import find_top_logprobs
from skyfleet.serving.requests import (
    BaseRequest,
    ChatCompletionRequest,
    CompletionRequest,
    build_error,
)

_REPLACEMENT_CHARACTER = "\ufffd"


def build_summary(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> dict[str, Any]:
    """The fields beside the choices: token usage and the oldest policy version that sampled."""
    n_prompt = sum(map(len, prompts))
    n_sampled = sum(len(completion.token_ids) for completion in completions)
    version = min(completion.policy_version for completion in completions)
    return {"usage": build_usage(n_prompt, n_sampled), "policy_version": version}


def build_usage(n_prompt: int, n_sampled: int) -> dict[str, int]:
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_sampled,
        "total_tokens": n_prompt + n_sampled,
    }


def strip_stop(request: BaseRequest, text: str, *, is_whole: bool = True) -> str:
    """The text before a stop string; of an incomplete text, the part that no stop string can remove."""
    stop_strings = () if request.include_stop_str_in_output else request.stop_strings
    ends = [end for stop in stop_strings if (end := text.find(stop)) >= 0]
    if ends:
        return text[: min(ends)]
    if is_whole:
        return text
    text = text.rstrip(_REPLACEMENT_CHARACTER)
    return text[: len(text) + 1 - max(map(len, stop_strings), default=1)]


def decode_completion(renderer: Renderer, token_ids: Sequence[int]) -> str:
    stopped = bool(token_ids) and token_ids[-1] in renderer.stop_token_ids
    return renderer.text(token_ids[:-1] if stopped else token_ids)


def build_chat_message(
    request: ChatCompletionRequest, renderer: Renderer, token_ids: Sequence[int]
) -> dict[str, Any]:
    """The assistant message. Calls without offered tools, and malformed calls, are content."""
    message = renderer.parse(token_ids, request.tool_specs)
    text = message.text
    if message.tool_calls and not request.tool_specs:
        message = Message(role="assistant", reasoning=message.reasoning)
        text = split_reasoning(decode_completion(renderer, token_ids))[0].strip()
    # The later calls of a turn are not sent; the client's next request shows the turn without them.
    wanted = message.tool_calls if request.parallel_tool_calls else message.tool_calls[:1]
    calls = _make_ids_unique(wanted, request.call_ids)
    message_fields = to_openai_message(replace(message, tool_calls=calls))
    text = "\n".join(filter(None, (text, *message.malformed_calls)))
    message_fields["content"] = strip_stop(request, text)
    if message.malformed_calls:
        message_fields["malformed_calls"] = list(message.malformed_calls)
    if message.reasoning is not None:
        message_fields["reasoning_content"] = message.reasoning
    return message_fields


def _make_ids_unique(calls: Sequence[ToolCall], used: Collection[str]) -> tuple[ToolCall, ...]:
    """Make each call id unique in the conversation; an id that the model wrote stays if it is new."""
    taken, unique = {*used, *(call.id for call in calls)}, list[ToolCall]()
    for index, call in enumerate(calls):
        call_id, number = call.id, len(used)
        if call_id == f"call_{index}":  # the model wrote none
            call_id = f"call_{uuid4().hex}"
        elif call_id in used:
            # Kimi K2's format, from which gpt-oss takes the tool name.
            while (call_id := format_call_id(call.name, number)) in taken:
                number += 1
        taken.add(call_id)
        unique.append(replace(call, id=call_id))
    return tuple(unique)


def chat_finish_reason(completion: Completion, message: dict[str, Any]) -> str:
    has_calls = "tool_calls" in message and completion.finish == "stop"
    return "tool_calls" if has_calls else completion.finish


def chat_token_fields(
    request: ChatCompletionRequest,
    renderer: Renderer,
    completion: Completion,
    generated: GenerateRequest | None = None,
    *,
    offset: int = 0,
) -> dict[str, Any]:
    """The token fields of a choice that the request asks for; it begins at `offset` of the turn."""
    fields: dict[str, Any] = {"logprobs": None}
    if request.logprobs:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        content = [_logprob(renderer.text([token]), logprob) for token, logprob in pairs]
        for position, entry in enumerate(content):
            top = () if generated is None else find_top_logprobs(generated, offset + position)
            entry["top_logprobs"] = [
                {
                    key: value
                    for key, value in _logprob(renderer.text([t]), p).items()
                    if key in _TOP
                }
                for t, p in top
            ]
        fields["logprobs"] = {"content": content}
    if request.return_token_ids:
        fields["token_ids"] = list(completion.token_ids)
    return fields


def text_token_fields(
    request: CompletionRequest, renderer: Renderer, completion: Completion, *, offset: int = 0
) -> dict[str, Any]:
    fields: dict[str, Any] = {"logprobs": None}
    if request.logprobs is not None:
        tokens = [renderer.text([token]) for token in completion.token_ids]
        offsets = [offset + len("".join(tokens[:i])) for i in range(len(tokens))]
        fields["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": list(completion.logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }
    if request.return_token_ids:
        fields["token_ids"] = list(completion.token_ids)
    return fields


_TOP = ("token", "logprob", "bytes")


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    whole = _REPLACEMENT_CHARACTER not in text
    return {
        "token": text,
        "logprob": logprob,
        "bytes": list(text.encode()) if whole else None,
        "top_logprobs": [],
    }


T = TypeVar("T")
Slices = AsyncIterator[tuple[Completion, bool]]
Choices = AsyncIterator[tuple[Completion, dict[str, Any]]]

_PARTIAL_TAG = re.compile(r"\s*[<\[][^<\[]{0,31}\Z")
"""The end of a text that may be the beginning of a tag."""


async def stream_events(
    fields: Mapping[str, Any],
    request: BaseRequest,
    prompt: list[int],
    choices: Sequence[Choices],
    *,
    on_end: Callable[[int, list[int]], object] = lambda index, sampled: None,
) -> AsyncIterator[str]:
    """One chunk per slice of each choice, as they come, then the usage if requested.

    `on_end` gets each choice's index and all of its sampled tokens.
    """
    sampled: list[list[int]] = [[] for _ in choices]
    has_prompt = not request.return_token_ids
    try:
        async for index, (completion, choice) in merge_streams(choices):
            more: dict[str, Any] = {"policy_version": completion.policy_version}
            if not has_prompt:
                more["prompt_token_ids"], has_prompt = prompt, True
            sampled[index] += completion.token_ids
            yield _event({**fields, "choices": [choice | {"index": index}], **more})
        for index, tokens in enumerate(sampled):
            on_end(index, tokens)
        if request.stream_options.include_usage:
            usage = build_usage(len(prompt), sum(map(len, sampled)))
            yield _event({**fields, "choices": [], "usage": usage})
    except EngineError as error:
        status = 400 if isinstance(error, RequestRejectedError) else 500
        yield _event(build_error(str(error), status=status))
    yield "data: [DONE]\n\n"


async def merge_streams(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """The items of all streams with the index of their stream, in the order in which they come."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T]] = asyncio.Queue()

    async def read(index: int, stream: AsyncIterator[T]) -> None:
        async for item in stream:
            queue.put_nowait((index, item))

    readers = [asyncio.ensure_future(read(*pair)) for pair in enumerate(streams)]
    reading = asyncio.gather(*readers)
    try:
        while not (reading.done() and queue.empty()):
            waiting = asyncio.ensure_future(queue.get())
            pending: set[asyncio.Future[Any]] = {waiting, reading}
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                yield waiting.result()
            else:
                waiting.cancel()
        reading.result()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def stream_text_choices(
    request: CompletionRequest, renderer: Renderer, slices: Slices
) -> Choices:
    sampled: list[int] = []
    sent = offset = 0
    async for part, is_last in slices:
        sampled += part.token_ids
        text = strip_stop(request, decode_completion(renderer, sampled), is_whole=is_last)
        choice = {
            "index": 0,
            "text": text[sent:],
            "finish_reason": part.finish if is_last else None,
        }
        yield part, choice | text_token_fields(request, renderer, part, offset=offset)
        sent, offset = len(text), len(renderer.text(sampled))


async def stream_chat_choices(
    request: ChatCompletionRequest,
    renderer: Renderer,
    slices: Slices,
    *,
    in_reasoning: bool = True,
    generated: GenerateRequest | None = None,
) -> Choices:
    """Text that later tokens may reinterpret waits for the last slice; with tools, all content does.

    `in_reasoning`: the prompt opens reasoning, so text may belong to it until it is closed.
    """
    sampled: list[int] = []
    sent = {"content": "", "reasoning_content": ""}
    async for part, is_last in slices:
        delta: dict[str, Any] = {} if sampled else {"role": "assistant", "content": ""}
        offset = len(sampled)
        sampled += part.token_ids
        finish = None
        message: dict[str, Any] = {}
        if is_last:
            message = build_chat_message(request, renderer, sampled)
            finish = chat_finish_reason(part, message)
            if calls := message.get("tool_calls"):
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        elif not request.tool_specs:
            message = _stable_fields(request, renderer.parse(sampled), in_reasoning=in_reasoning)
        for key, before in sent.items():
            now = message.get(key) or ""
            more = now.removeprefix(before)
            # At the end, text that changed is sent again rather than lost.
            if more and (is_last or now.startswith(before)):
                delta[key], sent[key] = more, before + more
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        yield part, choice | chat_token_fields(request, renderer, part, generated, offset=offset)


def _stable_fields(
    request: ChatCompletionRequest, message: Message, *, in_reasoning: bool
) -> dict[str, str]:
    """The text that no later token can change; nothing once a call has begun."""
    if (
        message.tool_calls
        or message.malformed_calls
        or (in_reasoning and message.reasoning is None)
    ):
        return {}
    texts = {"content": message.text, "reasoning_content": message.reasoning or ""}
    return {
        key: strip_stop(request, _PARTIAL_TAG.sub("", text), is_whole=False)
        for key, text in texts.items()
    }


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
