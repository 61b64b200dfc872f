"""Build OpenAI API responses, whole or as server-sent events, with vLLM's token fields."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from skyfleet.chat.call_ids import format_call_id
from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.tool_calls.parser import thoughts_aside
from skyfleet.chat.transcript import Completion
from skyfleet.engines.http_client import RefusedError
from skyfleet.engines.openai_messages import written_message
from skyfleet.errors import EngineError
from skyfleet.serving.requests import BaseRequest, ChatCompletionRequest, CompletionRequest, build_error

_HALF_A_LETTER = "\ufffd"


def summarize(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> dict[str, Any]:
    """What an answer says beside its choices: tokens in all, and the oldest weights that spoke."""
    n_prompt = sum(map(len, prompts))
    n_sampled = sum(len(completion.token_ids) for completion in completions)
    version = min(completion.policy_version for completion in completions)
    return {"usage": usage(n_prompt, n_sampled), "policy_version": version}


def usage(n_prompt: int, n_sampled: int) -> dict[str, int]:
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_sampled,
        "total_tokens": n_prompt + n_sampled,
    }


def strip_stop(body: BaseRequest, text: str, *, is_whole: bool = True) -> str:
    """The text before a stop string; of a text that grows, what no stop string can take back."""
    stop_strings = () if body.include_stop_str_in_output else body.stop_strings
    ends = [end for stop in stop_strings if (end := text.find(stop)) >= 0]
    if ends:
        return text[: min(ends)]
    if is_whole:
        return text
    text = text.rstrip(_HALF_A_LETTER)
    return text[: len(text) + 1 - max(map(len, stop_strings), default=1)]


def decode_completion(renderer: Renderer, token_ids: Sequence[int]) -> str:
    ended = bool(token_ids) and token_ids[-1] in renderer.stop_token_ids
    return renderer.text(token_ids[:-1] if ended else token_ids)


def build_chat_message(body: ChatCompletionRequest, renderer: Renderer, token_ids: Sequence[int]) -> dict[str, Any]:
    """What the turn says. A call that nobody offered a tool for, or that is malformed, is text."""
    message = renderer.parse(token_ids, body.tool_specs)
    text = message.text
    if message.tool_calls and not body.tool_specs:
        message = Message(role="assistant", reasoning=message.reasoning)
        text = thoughts_aside(decode_completion(renderer, token_ids))[0].strip()
    calls = _make_ids_unique(message.tool_calls, body.call_ids)
    written = written_message(replace(message, tool_calls=calls))
    text = "\n".join(filter(None, (text, *message.malformed_calls)))
    written["content"] = strip_stop(body, text)
    if message.malformed_calls:
        written["malformed_calls"] = list(message.malformed_calls)
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    return written


def _make_ids_unique(calls: Sequence[ToolCall], used: Collection[str]) -> tuple[ToolCall, ...]:
    """An id is told once, so that agents can keep results by it; a model's own new one is kept."""
    taken, told = {*used, *(call.id for call in calls)}, list[ToolCall]()
    for place, call in enumerate(calls):
        own, number = call.id, len(used)
        if own == f"call_{place}":  # the model named none
            own = f"call_{uuid4().hex}"
        elif own in used:
            # As Kimi K2 counts; gpt-oss reads the name in it.
            while (own := format_call_id(call.name, number)) in taken:
                number += 1
        taken.add(own)
        told.append(replace(call, id=own))
    return tuple(told)


def chat_finish_reason(completion: Completion, message: dict[str, Any]) -> str:
    called = "tool_calls" in message and completion.finish == "stop"
    return "tool_calls" if called else completion.finish


def chat_token_fields(body: ChatCompletionRequest, renderer: Renderer, completion: Completion) -> dict[str, Any]:
    """The fields of a choice that tell its tokens, as far as they were asked for."""
    told: dict[str, Any] = {"logprobs": None}
    if body.logprobs:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        told["logprobs"] = {
            "content": [_logprob(renderer.text([token]), logprob) for token, logprob in pairs]
        }
    if body.return_token_ids:
        told["token_ids"] = list(completion.token_ids)
    return told


def text_token_fields(
    body: CompletionRequest, renderer: Renderer, completion: Completion, *, offset: int = 0
) -> dict[str, Any]:
    told: dict[str, Any] = {"logprobs": None}
    if body.logprobs is not None:
        tokens = [renderer.text([token]) for token in completion.token_ids]
        offsets = [offset + len("".join(tokens[:i])) for i in range(len(tokens))]
        told["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": list(completion.logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }
    if body.return_token_ids:
        told["token_ids"] = list(completion.token_ids)
    return told


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    whole = _HALF_A_LETTER not in text
    return {
        "token": text,
        "logprob": logprob,
        "bytes": list(text.encode()) if whole else None,
        "top_logprobs": [],
    }


Slices = AsyncIterator[tuple[Completion, bool]]
Choices = AsyncIterator[tuple[Completion, dict[str, Any]]]

_MARK_BEGUN = re.compile(r"\s*[<\[][^<\[]{0,31}\Z")
"""The end of a text that may be the first half of a mark."""


async def stream_events(
    fields: Mapping[str, Any],
    body: BaseRequest,
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
        yield _event(build_error(str(error), status=status))
    yield "data: [DONE]\n\n"


async def stream_text_choices(body: CompletionRequest, renderer: Renderer, slices: Slices) -> Choices:
    said: list[int] = []
    sent = offset = 0
    async for part, is_last in slices:
        said += part.token_ids
        text = strip_stop(body, decode_completion(renderer, said), is_whole=is_last)
        choice = {
            "index": 0,
            "text": text[sent:],
            "finish_reason": part.finish if is_last else None,
        }
        yield part, choice | text_token_fields(body, renderer, part, offset=offset)
        sent, offset = len(text), len(renderer.text(said))


async def stream_chat_choices(
    body: ChatCompletionRequest, renderer: Renderer, slices: Slices, *, in_reasoning: bool = True
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
            message = build_chat_message(body, renderer, said)
            finish = chat_finish_reason(part, message)
            if calls := message.get("tool_calls"):
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        elif not body.tool_specs:
            message = _settled(body, renderer.parse(said), in_reasoning=in_reasoning)
        for key, before in sent.items():
            now = message.get(key) or ""
            more = now.removeprefix(before)
            # At the end rather twice than never.
            if more and (is_last or now.startswith(before)):
                delta[key], sent[key] = more, before + more
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        yield part, choice | chat_token_fields(body, renderer, part)


def _settled(body: ChatCompletionRequest, message: Message, *, in_reasoning: bool) -> dict[str, str]:
    """What the whole turn will say too, whatever comes; nothing more once a call has begun."""
    if message.tool_calls or message.malformed_calls or (in_reasoning and message.reasoning is None):
        return {}
    texts = {"content": message.text, "reasoning_content": message.reasoning or ""}
    return {
        key: strip_stop(body, _MARK_BEGUN.sub("", text), is_whole=False)
        for key, text in texts.items()
    }


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
