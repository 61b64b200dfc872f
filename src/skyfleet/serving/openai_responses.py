"""OpenAI's responses API, as a translation to and from chat completions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import count
from typing import Any
from uuid import uuid4

from skyfleet.serving.completions import create_chat_completion
from skyfleet.serving.model_service import ModelService
from skyfleet.serving.requests import ApiError

_SAME_KEYS = frozenset(
    [
        *("model", "temperature", "top_p", "parallel_tool_calls", "top_logprobs", "metadata"),
        *("user", "store", "service_tier", "prompt_cache_key", "safety_identifier", "stream"),
        *("seed", "top_k", "min_p", "stop", "chat_template_kwargs"),
    ]
)
_OWN_KEYS = frozenset(
    ["input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "include"]
)
_SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
    "stream_options": ({}, {"include_obfuscation": False}),
}
_IGNORED_INCLUDES = frozenset(["reasoning.encrypted_content", "message.output_text.logprobs"])


async def create_response(
    service: ModelService, raw: bytes, client_session: str | None
) -> dict[str, Any] | AsyncIterator[str]:
    """A stream sends its events when the whole response is there."""
    request = _parse(raw)
    chat = await create_chat_completion(
        service, json.dumps(_to_chat_request(request)).encode(), client_session
    )
    assert isinstance(chat, dict)  # `stream` is not passed on
    response = _to_response(request, chat)
    return _stream(response) if request.get("stream") else response


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        request = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise ApiError("the body is not a JSON object; send one")
    request = {key: value for key, value in request.items() if value is not None}
    for key, value in request.items():
        allowed = _SUPPORTED_VALUES.get(key)
        if key == "include":
            is_supported = isinstance(value, list) and _IGNORED_INCLUDES.issuperset(value)
        else:
            is_supported = value in allowed if allowed else key in _SAME_KEYS | _OWN_KEYS
        if not is_supported:
            raise ApiError(f"{key}={value!r:.100} is not supported; leave it out", param=key)
    if "input" not in request:
        raise ApiError("input is missing; send it", param="input")
    return request


def _to_chat_request(request: Mapping[str, Any]) -> dict[str, Any]:
    chat = {key: request[key] for key in _SAME_KEYS & request.keys() if key != "stream"}
    chat["messages"] = list(_to_messages(request))
    if "max_output_tokens" in request:
        chat["max_completion_tokens"] = request["max_output_tokens"]
    if tools := request.get("tools"):
        chat["tools"] = [_to_chat_tool(tool) for tool in _expect(tools, list, "tools")]
    match request.get("tool_choice"):
        case None:
            pass
        case {"type": "function", "name": name}:
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        case choice:
            chat["tool_choice"] = choice
    text_format = _expect(request.get("text", {}), dict, "text").get("format") or {}
    if _expect(text_format, dict, "text.format").get("type", "text") == "json_schema":
        schema = {key: value for key, value in text_format.items() if key != "type"}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif text_format:
        chat["response_format"] = text_format
    if request.get("top_logprobs"):
        chat["logprobs"] = True
    return chat


def _to_chat_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ApiError(
            f"tools has {tool!r:.100}; only tools of type function run here, hosted ones do not",
            param="tools",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _to_messages(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Calls that follow one another, and the text before them, are one assistant message."""
    if instructions := request.get("instructions"):
        yield {"role": "system", "content": instructions}
    given = request["input"]
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    assistant: dict[str, Any] | None = None
    for item in _expect(given, list, "input"):
        kind = _expect(item, dict, "input").get("type", "message")
        role = item.get("role")
        if kind == "reasoning":
            continue  # the server keeps the reasoning of a conversation that continues unchanged
        if kind == "function_call":
            assistant = assistant or {"role": "assistant", "content": ""}
            call = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            calls = assistant.setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": call})
            continue
        if assistant is not None:
            yield assistant
            assistant = None
        if kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _join_text(output)
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
        elif kind == "message" and role == "assistant":
            assistant = {"role": role, "content": _join_text(item.get("content"))}
        elif kind == "message":
            yield {"role": role, "content": _join_text(item.get("content"))}
        else:
            raise ApiError(f"input has an item of type {kind!r:.60}, which is not supported")
    if assistant is not None:
        yield assistant


def _join_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = _expect(content, list, "input")
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError("input has a part without text; only text is supported", param="input")
    return "".join(map(str, texts))


def _expect(value: Any, kind: type, param: str) -> Any:
    if not isinstance(value, kind):
        raise ApiError(f"{param}={value!r:.100} is not a {kind.__name__}; send one", param=param)
    return value


def _to_response(request: Mapping[str, Any], chat: Mapping[str, Any]) -> dict[str, Any]:
    (choice,) = chat["choices"]
    is_cut = choice["finish_reason"] == "length"
    usage = chat["usage"]
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": chat["created"],
        "model": chat["model"],
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "metadata": request.get("metadata", {}),
        "output": list(_to_output(choice, "incomplete" if is_cut else "completed")),
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": request.get("temperature", 1.0),
        "text": request.get("text", {"format": {"type": "text"}}),
        "tool_choice": request.get("tool_choice", "auto"),
        "tools": request.get("tools", []),
        "top_p": request.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        "policy_version": chat["policy_version"],
    }


def _to_output(choice: Mapping[str, Any], status: str) -> Iterator[dict[str, Any]]:
    message = choice["message"]
    if reasoning := message.get("reasoning_content"):
        yield {
            "type": "reasoning",
            "id": f"rs_{uuid4().hex}",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": reasoning}],
        }
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        yield {
            "type": "message",
            "id": f"msg_{uuid4().hex}",
            "role": "assistant",
            "status": status,
            "content": [part | {"logprobs": logprobs}],
        }
    for call in calls:
        yield {
            "type": "function_call",
            "id": f"fc_{uuid4().hex}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": status,
        }


async def _stream(response: Mapping[str, Any]) -> AsyncIterator[str]:
    numbers = count()

    def event(kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": next(numbers), **fields}
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"

    started = {**response, "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {}
        empty |= {"arguments": ""} if item["type"] == "function_call" else {}
        yield event(
            "response.output_item.added",
            output_index=index,
            item=item | empty | ({"status": "in_progress"} if empty else {}),
        )
        if item["type"] == "message":
            (part,) = item["content"]
            text, within = part["text"], {**at, "content_index": 0}
            yield event("response.content_part.added", **within, part=part | {"text": ""})
            yield event("response.output_text.delta", **within, delta=text, logprobs=[])
            yield event("response.output_text.done", **within, text=text, logprobs=[])
            yield event("response.content_part.done", **within, part=part)
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            yield event("response.function_call_arguments.delta", **at, delta=arguments)
            yield event(
                "response.function_call_arguments.done",
                **at,
                arguments=arguments,
                name=item["name"],
            )
        yield event("response.output_item.done", output_index=index, item=item)
    kind = "incomplete" if response["status"] == "incomplete" else "completed"
    yield event(f"response.{kind}", response=response)
