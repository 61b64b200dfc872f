"""Template: a chat template with the settings it is rendered with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError

from skyfleet.chat.call_ids import nine_characters
from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.text_only import text_only
from skyfleet.chat.tokenizer import Tokenizer, encode
from skyfleet.chat.tool_calls.strict_json import encode as as_json
from skyfleet.chat.tools_section import function_schema
from skyfleet.errors import ConfigError, ModelError

_OURS = {
    *("chat_template", "tools", "tokenize", "add_generation_prompt"),
    *("return_dict", "return_assistant_tokens_mask"),
}


class RefusedConversationError(ModelError):
    """The template raised: its makers did not mean such a conversation."""


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
    """Jinja; None takes the tokenizer's own."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the template, such as enable_thinking."""
    nine_character_ids: bool = False
    """Calls and their results are handed over under ids of nine letters and digits."""
    arguments_as_text: bool = False
    """A call's arguments are handed over as JSON text."""

    def __post_init__(self) -> None:
        taken = sorted(_OURS & self.kwargs.keys())
        if taken:
            raise ConfigError(
                f"generator.chat_template_kwargs has {taken}, which rendering sets itself; "
                "leave them out"
            )

    @property
    def text(self) -> str:
        """The Jinja source; of several that a tokenizer carries, the one for tools."""
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
        spell: Callable[[str], str] = str,
    ) -> str:
        """The conversation as text; `prompt` adds how the assistant's next turn begins.

        `spell` is applied to all that is said and shown, before the template sees it.
        """
        rendered: str = self._apply(
            messages, tools, spell, add_generation_prompt=prompt, tokenize=False
        )
        return rendered

    def tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return encode(self.tokenizer, self.render(messages, tools))

    def marked(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> tuple[list[int], list[bool]]:
        """The conversation as tokens, and which of them stand within `{% generation %}`."""
        rendered = self._apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(rendered["input_ids"]), [bool(mark) for mark in rendered["assistant_masks"]]

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        spell: Callable[[str], str] = str,
        **options: Any,
    ) -> Any:
        said = _spelled(list(map(self._as_dict, messages)), spell)
        shown = _spelled([function_schema(tool) for tool in tools], spell)
        roles = ", ".join(message.role for message in messages)
        try:
            return self.tokenizer.apply_chat_template(
                said, tools=shown or None, chat_template=self.source, **options, **self.kwargs
            )
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template is not Jinja: line {error.lineno}: {error.message}; correct it"
            ) from error
        except TemplateError as error:
            raise RefusedConversationError(
                f"the chat template refuses a conversation of {roles}: {error}; "
                "give a chat_template that takes it"
            ) from error
        except Exception as error:  # a template is a program: it may raise anything
            raise RefusedConversationError(
                f"the chat template breaks on a conversation of {roles}: {type(error).__name__}: "
                f"{error}; give a chat_template that takes it"
            ) from error

    def _as_dict(self, message: Message) -> dict[str, Any]:
        content = "\n".join(filter(None, (text_only(message), *message.malformed_calls)))
        fields: dict[str, Any] = {"role": message.role, "content": content}
        if message.reasoning is not None:
            # gpt-oss spells it `thinking`.
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
        return nine_characters(call_id) if self.nine_character_ids else call_id

    def _arguments(self, call: ToolCall) -> dict[str, Any] | str:
        arguments = dict(call.arguments)
        return as_json(arguments) if self.arguments_as_text else arguments


def _spelled(value: Any, spell: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return spell(value)
    if isinstance(value, Mapping):
        return {spell(key): _spelled(inner, spell) for key, inner in value.items()}
    return [_spelled(inner, spell) for inner in value] if isinstance(value, list) else value
