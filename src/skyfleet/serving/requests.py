"""Parse and validate the requests of OpenAI API clients; no key that changes the result is ignored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.openai_messages import parse_openai_message
from skyfleet.errors import MissingExtraError

try:
    from starlette.requests import ClientDisconnect, Request
except ImportError:
    raise MissingExtraError("starlette", "serve") from None

RequestT = TypeVar("RequestT", bound="BaseRequest")
T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected; nobody receives it."""

_SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0, 1),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Keys that would change the response, with the values that do not."""
_IGNORED_KEYS = frozenset(
    [
        "add_special_tokens",
        "cache_salt",
        "metadata",
        "priority",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "store",
        "user",
    ]
)
"""Keys without effect here."""


class _NullTolerantModel(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


class _StrictModel(_NullTolerantModel, extra="forbid"):
    """Part of a request. `ignored_keys`: clients send them, and they have no effect here."""

    ignored_keys: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in cls.ignored_keys}


class StreamOptions(_NullTolerantModel):
    include_usage: bool = False


class BaseRequest(_NullTolerantModel):
    model: str
    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stop_strings = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(filter(None, stop_strings))


class CompletionRequest(BaseRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=1)
    """0 and 1 both return the logprob of the sampled token only."""


class _Function(_StrictModel):
    # Agent SDKs always send it; decoding is not constrained here.
    ignored_keys = frozenset(["strict"])

    name: str
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}


class _Tool(_StrictModel):
    ignored_keys = frozenset(["cache_control"])

    type: Literal["function"] = "function"
    function: _Function


class _TextPart(_StrictModel):
    ignored_keys = frozenset(["annotations", "cache_control"])

    type: Literal["text"]
    text: str


class _ChatMessage(_StrictModel):
    # Fields of our responses that clients send back, also through LiteLLM.
    ignored_keys = frozenset(
        [
            "annotations",
            "cache_control",
            "malformed_calls",
            "provider_specific_fields",
            "reasoning_details",
            "thinking_blocks",
        ]
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str | None = None
    name: str | None = None
    """Of an assistant or a tool; user and system messages with a name are rejected."""

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.name is not None and self.role not in ("assistant", "tool"):
            raise ApiError(
                f"name={self.name!r:.100} of a {self.role} message is not supported; put it into "
                "the content",
                param="name",
            )
        return self

    def to_message(self) -> Message:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        if self.role == "assistant":
            return parse_openai_message({**self.model_dump(), "content": text}, splits=False)
        role = "system" if self.role == "developer" else self.role
        return Message(role=role, content=text, tool_call_id=self.tool_call_id)


class _NamedFunction(_StrictModel):
    name: str


class NamedTool(_StrictModel):
    type: Literal["function"] = "function"
    function: _NamedFunction


class JsonSchema(_StrictModel):
    # Decoding is always strict here.
    ignored_keys = frozenset(["strict", "description"])

    name: str = ""
    schema_: dict[str, Any] = Field({}, alias="schema")


class ResponseFormat(_StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError(
                f"response_format.type={self.type!r} with"
                f"{'out' if self.json_schema is None else ''} json_schema; send both or neither",
                param="response_format",
            )
        return self


class ChatCompletionRequest(BaseRequest):
    messages: list[_ChatMessage] = Field(min_length=1)
    tools: list[_Tool] = []
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat(type="text")
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ApiError(
                f"tool_choice names {choice.function.name!r:.60}, which is not among the tools "
                f"{names}; offer it",
                param="tool_choice",
            )
        if choice == "required" and not names:
            raise ApiError("tool_choice='required' needs tools; send some", param="tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                f"top_logprobs={self.top_logprobs} needs logprobs=true; set it",
                param="top_logprobs",
            )
        if self.must_call and self.response_format.type != "text":
            raise ApiError(
                "response_format with a tool_choice that demands a call: the text would be empty; "
                "leave one out",
                param="response_format",
            )
        return self

    @property
    def must_call(self) -> bool:
        """Whether the response has to be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def required_specs(self) -> tuple[ToolSpec, ...]:
        """The tools of which one has to be called."""
        choice = self.tool_choice
        name = choice.function.name if isinstance(choice, NamedTool) else None
        return tuple(tool for tool in self.tool_specs if name in (None, tool.name))

    @property
    def call_ids(self) -> set[str]:
        """The call ids that occur in the conversation."""
        return {str(call.get("id")) for message in self.messages for call in message.tool_calls}

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        if self.tool_choice == "none":
            return ()
        return tuple(ToolSpec(**tool.function.model_dump()) for tool in self.tools)


def parse_request(
    raw: bytes, kind: type[RequestT], *, template_kwargs: Mapping[str, Any]
) -> RequestT:
    """`template_kwargs` are the renderer's; a chat request may only repeat them."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ApiError("the body is not a JSON object; send one")
    fixed = _SUPPORTED_VALUES | {"chat_template_kwargs": ({}, dict(template_kwargs))}
    known = kind.model_fields.keys() | fixed.keys() | _IGNORED_KEYS
    for key, value in data.items():
        is_supported = value in fixed[key] if key in fixed else key in known
        if value is not None and not is_supported:
            raise ApiError(f"{key}={value!r:.100} is not supported; leave it out", param=key)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the body"
        if first["type"] == "missing":
            raise ApiError(f"{key} is missing; send it", param=key) from error
        raise ApiError(f"{key}={first['input']!r:.100}; {first['msg']}", param=key) from error


class ApiError(Exception):
    """A request that the server rejects, in the format of OpenAI's API."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        return build_error(str(self), status=self.status, param=self.param, code=self.code)


def build_error(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        disconnecting.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
