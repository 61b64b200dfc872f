"""Template: a Jinja chat template with its tokenizer and its settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError

from skyfleet.chat.call_ids import shorten_call_id
from skyfleet.chat.message import (
    Message,
    ToolCall,
    ToolSpec,
    UnsupportedMessageError,
    extract_text,
)
from skyfleet.chat.tokenizer import Tokenizer, encode
from skyfleet.chat.tool_calls.strict_json import encode as as_json
from skyfleet.chat.tool_prompt import QWEN_AFTER, QWEN_BEFORE, to_openai_tool
from skyfleet.errors import ConfigError, ModelError

_RESERVED_KWARGS = {
    *("chat_template", "tools", "tokenize", "add_generation_prompt"),
    *("return_dict", "return_assistant_tokens_mask"),
}


class UnsupportedConversationError(UnsupportedMessageError):
    """The template raised an error: it does not support such a conversation."""


class TemplateTokenizer(Tokenizer, Protocol):
    @property
    def chat_template(self) -> Any: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    tokenizer: TemplateTokenizer
    source: str | None = None
    """Jinja source; None uses the tokenizer's own."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the template, such as enable_thinking."""
    nine_character_ids: bool = False
    """Pass calls and results with ids of nine letters and digits."""
    arguments_as_text: bool = False
    """Pass the arguments of a call as JSON text."""

    def __post_init__(self) -> None:
        reserved = sorted(_RESERVED_KWARGS & self.kwargs.keys())
        if reserved:
            raise ConfigError(
                f"generator.chat_template_kwargs has {reserved}, which the renderer sets itself; "
                "leave them out"
            )

    @property
    def text(self) -> str:
        """The Jinja source; if the tokenizer has several, the one named tool_use."""
        own = self.tokenizer.chat_template
        if self.source is None and isinstance(own, Mapping):
            return str(own.get("tool_use", own.get("default", "")))
        return self.source or own or ""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        prompt: bool = True,
        escape: Callable[[str], str] = str,
    ) -> str:
        """The conversation as text; `prompt` adds the generation prompt.

        `escape` is applied to every text of messages and tools before the template sees it.
        """
        rendered: str = self._apply(
            messages, tools, escape, add_generation_prompt=prompt, tokenize=False
        )
        return rendered

    def tokenize(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return encode(self.tokenizer, self.render(messages, tools))

    def generation_mask(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> tuple[list[int], list[bool]]:
        """The conversation as tokens, and which of them are inside `{% generation %}`."""
        rendered = self._apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(rendered["input_ids"]), [bool(inside) for inside in rendered["assistant_masks"]]

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        escape: Callable[[str], str] = str,
        **options: Any,
    ) -> Any:
        conversation = _escape_all(list(map(self._as_dict, messages)), escape)
        tool_list = _escape_all([to_openai_tool(tool) for tool in tools], escape)
        roles = ", ".join(message.role for message in messages)
        try:
            return self.tokenizer.apply_chat_template(
                conversation,
                tools=tool_list or None,
                chat_template=self.source,
                **options,
                **self.kwargs,
            )
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}; correct it"
            ) from error
        except TemplateError as error:
            raise UnsupportedConversationError(
                f"the chat template rejects a conversation of {roles}: {error}; "
                "use a chat_template that accepts it"
            ) from error
        except Exception as error:  # a template is code and may raise anything
            raise UnsupportedConversationError(
                f"the chat template fails on a conversation of {roles}: {type(error).__name__}: "
                f"{error}; use a chat_template that accepts it"
            ) from error

    def _as_dict(self, message: Message) -> dict[str, Any]:
        content = "\n".join(filter(None, (extract_text(message), *message.malformed_calls)))
        fields: dict[str, Any] = {"role": message.role, "content": content}
        if message.reasoning is not None:
            # gpt-oss reads the key `thinking`.
            fields["reasoning_content"] = fields["thinking"] = message.reasoning
        if message.tool_call_id is not None:
            fields["tool_call_id"] = self._id(message.tool_call_id)
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": self._id(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": self._arguments(call)},
                }
                for call in message.tool_calls
            ]
        return fields

    def _id(self, call_id: str) -> str:
        return shorten_call_id(call_id) if self.nine_character_ids else call_id

    def _arguments(self, call: ToolCall) -> dict[str, Any] | str:
        arguments = dict(call.arguments)
        return as_json(arguments) if self.arguments_as_text else arguments


def _escape_all(value: Any, escape: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {escape(key): _escape_all(inner, escape) for key, inner in value.items()}
    return [_escape_all(inner, escape) for inner in value] if isinstance(value, list) else value


_QWEN3 = r"""
{%- set system = messages[0].content if messages[0].role == 'system' %}
{%- if tools or system is defined %}
    {{- '<|im_start|>system\n' }}
    {{- system if system is defined }}
    {{- '\n\n' if tools and system is defined }}
    {%- if tools %}
        {{- BEFORE_TOOLS }}
        {%- for tool in tools %}
            {{- tool | tojson + ('' if loop.last else '\n') }}
        {%- endfor %}
        {{- AFTER_TOOLS }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
            {%- if message.reasoning_content is defined REASONING_CONDITION %}
                {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
            {%- endif %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}
                {{- '\n' if message.content or not loop.first }}
                {{- '<tool_call>\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
                {{- call.function.arguments | tojson + '}\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index].role != 'tool' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}
""".replace("BEFORE_TOOLS", json.dumps(QWEN_BEFORE)).replace("AFTER_TOOLS", json.dumps(QWEN_AFTER))

NAMED_TEMPLATES = {
    "qwen3_with_thinking": _QWEN3.replace("REASONING_CONDITION", ""),
    "qwen3_without_thinking": _QWEN3.replace("REASONING_CONDITION", "and loop.last"),
}
"""SkyRL's names. The first keeps all reasoning in context, the second that of the last turn only."""


def load_template(source: str, name_or_path: str | None) -> str | None:
    """The template source, or None for the tokenizer's own. `source` is name or file, as in SkyRL."""
    if name_or_path is None:
        return None
    key = f"generator.chat_template.name_or_path={name_or_path!r}"
    if source == "file":
        try:
            return Path(name_or_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{key} cannot be read: {error}; set it to the path of a Jinja file"
            ) from error
    if name_or_path not in NAMED_TEMPLATES:
        known = sorted(NAMED_TEMPLATES)
        raise ConfigError(f"{key}; choose from {known}, or set generator.chat_template.source=file")
    return NAMED_TEMPLATES[name_or_path]
