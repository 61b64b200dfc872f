"""JinjaRenderer: any Hugging Face chat template, trusted to join turns only after proof.

A template sees the whole conversation and may rewrite its past: drop old thoughts, move the tools
to the last question. The renderer tries it on probes, and where the past does not stand still
`append_only` is False, `reason` says why, and each turn opens a new transcript.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jinja2 import TemplateError

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.probes import ANSWER, QUESTION, TALK, THOUGHTFUL_WORK, TOOLS, WORK
from skyfleet.chat.text_only import text_only
from skyfleet.chat.tokenizer import Tokenizer, decode, encode
from skyfleet.chat.tool_calls.hermes import THINK, parse_hermes
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.chat.tools_section import function_schema
from skyfleet.errors import ModelError

logger = logging.getLogger(__name__)

CONVERSATIONS = ((TALK, ()), (WORK, TOOLS), (THOUGHTFUL_WORK, TOOLS))


class TemplateTokenizer(Tokenizer, Protocol):
    @property
    def chat_template(self) -> Any: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, object]: ...

    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...


def render_template(
    tokenizer: TemplateTokenizer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    **kwargs: Any,
) -> str:
    """The text the tokenizer's template gives; `kwargs` go to the template."""
    try:
        text: str = tokenizer.apply_chat_template(
            [_as_dict(message) for message in messages],
            tools=[function_schema(tool) for tool in tools] or None,
            tokenize=False,
            **kwargs,
        )
    except TemplateError as error:
        roles = ", ".join(message.role for message in messages)
        raise ModelError(
            f"the chat template refuses a conversation of {roles}: {error}; "
            "give a chat_template that takes it"
        ) from error
    return text


class JinjaRenderer:
    append_only: bool
    reason: str | None
    """Why turns cannot be joined; None when they can."""

    def __init__(
        self,
        tokenizer: TemplateTokenizer,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse: ToolCallParser = parse_hermes,
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = {**(chat_template_kwargs or {}), "chat_template": chat_template}
        self._parse = parse
        thoughtful = replace(ANSWER, reasoning="Birds.")
        self._writes_reasoning = "Birds." in render_template(
            tokenizer, [QUESTION, thoughtful], **self._kwargs
        )
        self._opens_thought = self._render([QUESTION], prompt=True).rstrip().endswith(THINK)
        self._end = self._find_end()
        self._end_text = decode(tokenizer, [self._end])
        ends = (self._end, tokenizer.eos_token_id)
        self.stop_token_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
        self.reason = self._why_not_append_only()
        self.append_only = self.reason is None
        if not self.append_only:
            logger.warning("every turn will open a new transcript: %s", self.reason)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        text = self._render(messages, tools, prompt=True)
        hidden = [tool.name for tool in tools if tool.name not in text]
        if hidden:
            raise ModelError(
                f"the chat template does not show the tools {hidden}; "
                'give a chat_template that does, or tools_style="qwen" for a ChatML tokenizer'
            )
        return encode(self._tokenizer, text)

    def join(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        return self._glue(last_token, messages) if self.append_only else None

    def parse(self, token_ids: Sequence[int]) -> Message:
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        text = self.text(token_ids[:-1] if ended else token_ids)
        return self._parse(THINK + text if self._opens_thought else text).message

    def write(self, message: Message) -> list[int]:
        prompt = self._render([QUESTION], prompt=True)
        text = self._up_to_end([QUESTION, message])
        if not text.startswith(prompt):
            raise ModelError(
                "the chat template's generation prompt is not how its assistant turns begin; "
                "give a chat_template where it is"
            )
        return encode(self._tokenizer, text.removeprefix(prompt))

    def text(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool
    ) -> str:
        if not self._writes_reasoning:
            messages = [_thinking_aloud(message) for message in messages]
        return render_template(
            self._tokenizer, messages, tools, add_generation_prompt=prompt, **self._kwargs
        )

    def _find_end(self) -> int:
        after = self._render([QUESTION, ANSWER], prompt=False).rpartition(ANSWER.text)[2]
        added = self._tokenizer.added_tokens_decoder
        ends = [token for token in encode(self._tokenizer, after) if token in added]
        if not ends:
            raise ModelError(
                f"the chat template ends an assistant turn with {after!r}, which holds no special "
                "token to stop at; give a chat_template that ends turns with one"
            )
        return ends[0]

    def _up_to_end(self, messages: Sequence[Message]) -> str:
        """The conversation up to and with the end of its last turn."""
        before, end, _ = self._render(messages, prompt=False).rpartition(self._end_text)
        return before + end

    def _glue(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        """What the template adds to a conversation that ends in some assistant turn."""
        calls = tuple(
            ToolCall(id=message.tool_call_id or f"call_{i}", name="look_up", arguments={})
            for i, message in enumerate(messages)
            if message.role == "tool"
        )
        base = [QUESTION, replace(ANSWER, tool_calls=calls)]
        before = self._up_to_end(base)
        whole = self._render([*base, *messages], prompt=True)
        if not whole.startswith(before):
            return None
        glue = encode(self._tokenizer, self._end_text + whole.removeprefix(before))
        return glue[1:] if last_token == self._end else glue

    def _why_not_append_only(self) -> str | None:
        """Play each probe turn by turn: the pieces must be the tokens of the whole."""
        try:
            for messages, tools in CONVERSATIONS:
                spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
                for start, stop in zip(spoken, [*spoken[1:], len(messages)], strict=True):
                    glue = self._glue(self._end, messages[start + 1 : stop])
                    said = self.open(messages[:start], tools) + self.write(messages[start])
                    if glue is None or said + glue != self.open(messages[:stop], tools):
                        heard = ", ".join(message.role for message in messages[:stop])
                        return f"the chat template gives {heard} other tokens than turn by turn"
        except ModelError as error:
            return str(error)
        return None


def _as_dict(message: Message) -> dict[str, Any]:
    content = "\n".join(filter(None, (text_only(message), *message.malformed_calls)))
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return fields


def _thinking_aloud(message: Message) -> Message:
    """The thought as part of the speech, for templates that would drop it."""
    if message.reasoning is None:
        return message
    aloud = f"<think>\n{message.reasoning}\n</think>\n\n{text_only(message)}"
    return replace(message, reasoning=None, content=aloud)
