"""JinjaRenderer: any Hugging Face chat template, used append-only if its output allows that.

A template sees the whole conversation and may rewrite its past: drop old reasoning, move the tools to
the last user message. The renderer tests the template once. If the past changes, `append_only` is
False, `reason` says why, and each turn starts a new transcript. If the template renders tool calls in
a format that the run does not parse, tools are rejected.

The text of a message never becomes a special token, as with built-in renderers; `<think>` alone may.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

from skyfleet.chat.message import Message, ToolCall, ToolSpec, inline_reasoning
from skyfleet.chat.template import Template, TemplateTokenizer, UnsupportedConversationError
from skyfleet.chat.template_checks import (
    ANSWER,
    CALL,
    QUESTION,
    SINGLE_CALL_DIALOGUE,
    TOOL_DIALOGUE,
    adapt_call_encoding,
    find_append_only_violation,
    find_call_mismatch,
)
from skyfleet.chat.tokenizer import END_THINK, THINK, PromptEncoder, SpecialToken, decode, encode
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.errors import EngineError, ModelError

logger = logging.getLogger(__name__)

_ESCAPE = "\ufdd0"  # a Unicode noncharacter: no text contains it


class JinjaRenderer:
    append_only: bool
    reason: str | None
    """Why turns cannot be continued; None if they can."""

    def __init__(
        self,
        template: Template,
        *,
        parse: ToolCallParser | None = None,
        is_parser_configured: bool = False,
        close_turns: bool = True,
    ) -> None:
        """Without `parse` calls are parsed as Hermes, if the template renders them so.

        `is_parser_configured`: the user named `parse` and may know the model better than its
        template does.
        """
        self._parse, self._close_turns = parse or parse_hermes, close_turns
        self._template = template = adapt_call_encoding(template, self._parse)
        self._tokenizer = template.tokenizer
        self._escaper = _SpecialTokenEscaper(template.tokenizer)
        # Some templates keep the reasoning of turns with calls and drop that of answers.
        self._renders_reasoning = any(
            "Birds." in template.render([QUESTION, replace(turn, reasoning="Birds.")], prompt=False)
            for turn in (ANSWER, CALL)
        )
        self._opens_reasoning = self._render([QUESTION]).rstrip().endswith(THINK)
        own_end, next_roles = self._first_special_token([]), self._next_role_tokens()
        ends = (own_end, self._tokenizer.eos_token_id, *next_roles)
        self.stop_token_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
        if not self.stop_token_ids:
            raise ModelError(
                "the chat template ends an assistant turn without a special token, and the "
                "tokenizer has no eos_token to stop at; use a chat_template that ends turns with one"
            )
        self._end = self.stop_token_ids[0]
        self._end_text = decode(self._tokenizer, [self._end]) if own_end is not None else ""
        self.append_only = True  # so that the check below can call `render_continuation`
        self._call_mismatch: str | None = None
        rejects_two_calls = self._rejects(TOOL_DIALOGUE)
        self.reason = (
            "the chat template ends an assistant turn without a special token"
            if own_end is None
            else find_append_only_violation(
                self, SINGLE_CALL_DIALOGUE if rejects_two_calls else TOOL_DIALOGUE
            )
        )
        self.append_only = self.reason is None
        self._call_mismatch = find_call_mismatch(
            template, self._parse, is_guess=parse is None, is_configured=is_parser_configured
        )
        if not self.append_only:
            logger.warning("every turn will start a new transcript: %s", self.reason)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        try:
            text = self._render(messages, tools)
        except UnsupportedConversationError as error:
            # Two calls in one turn, for example: model output may end its episode, not the run.
            if any(message.role == "assistant" for message in messages):
                raise EngineError(str(error)) from error
            raise
        hidden = [tool.name for tool in tools if tool.name not in text]
        if hidden:
            raise ModelError(
                f"the chat template does not list the tools {hidden}; "
                "set generator.chat_template to one that does"
            )
        if tools and self._call_mismatch:
            raise ModelError(self._call_mismatch)
        return self._escaper.encode(text)

    def render_continuation(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        following = self._render_following(messages) if self.append_only else None
        is_closed = last_token == self._end or not self._close_turns
        return following[1:] if following and is_closed else following

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        stopped = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        text = self.text(token_ids[:-1] if stopped else token_ids)
        return self.parse_text(THINK + text if self._opens_reasoning else text, tools)

    def parse_text(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        return self._parse(text, tools).message

    def render_completion(self, message: Message) -> list[int]:
        prompt = self._render([QUESTION])
        text = self._render_up_to_end([QUESTION, message])
        if not text.startswith(prompt):
            raise ModelError(
                "the chat template's generation prompt differs from the beginning of its assistant "
                "turns; use a chat_template where they are the same"
            )
        token_ids = self._escaper.encode(text.removeprefix(prompt))
        return token_ids if self._end_text else [*token_ids, self._end]

    def text(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool = True
    ) -> str:
        if not self._renders_reasoning:
            messages = [
                replace(message, reasoning=None, content=inline_reasoning(message))
                for message in messages
            ]
        return self._template.render(messages, tools, prompt=prompt, escape=self._escaper.escape)

    def _first_special_token(self, following: Sequence[Message]) -> int | None:
        """The first special token behind an answer that `following` follows."""
        whole = self._render([QUESTION, ANSWER, *following], prompt=False)
        after = whole.rpartition(ANSWER.text)[2]
        added = self._tokenizer.added_tokens_decoder
        return next((token for token in self._escaper.encode(after) if token in added), None)

    def _next_role_tokens(self) -> list[int | None]:
        """How the next message begins: it ends a turn that has no end token of its own."""
        if self._first_special_token([]) is not None:
            return []
        result = Message(role="tool", content="seen", tool_call_id="call_0")
        continuations = ([Message(role="user", content="go on")], [result])
        return [
            self._first_special_token(following)
            for following in continuations
            if not self._rejects([QUESTION, ANSWER, *following])
        ]

    def _render_up_to_end(self, messages: Sequence[Message]) -> str:
        """The conversation up to and including the end token of its last turn."""
        if not self._end_text:
            return self._render(messages, prompt=False)
        before, end, _ = self._render(messages, prompt=False).rpartition(self._end_text)
        return before + end

    def _render_following(self, messages: Sequence[Message]) -> list[int] | None:
        """The end token of some assistant turn, and what the template renders after it."""
        # An unknown tool: a template that repeats the name of the call cannot be continued.
        calls = tuple(
            ToolCall(id=message.tool_call_id or f"call_{i}", name="some_tool", arguments={})
            for i, message in enumerate(messages)
            if message.role == "tool"
        )
        base = [QUESTION, replace(ANSWER, tool_calls=calls)]
        if self._rejects(base):
            base = [QUESTION, Message(role="assistant", tool_calls=calls[:1])]
        before = self._render_up_to_end(base)
        whole = self._render([*base, *messages])
        if not whole.startswith(before):
            return None
        return self._escaper.encode(self._end_text + whole.removeprefix(before))

    def _rejects(self, messages: Sequence[Message]) -> bool:
        try:
            self._render(messages, prompt=False)
        except UnsupportedConversationError:
            return True
        return False


class _SpecialTokenEscaper:
    """Keeps the text of messages from becoming special tokens when a template renders it."""

    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        longest_first = sorted(special, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._tokenizer, self._encode = tokenizer, PromptEncoder(tokenizer)

    def escape(self, text: str) -> str:
        return self._pattern.sub(_escape_match, text)

    def encode(self, rendered: str) -> list[int]:
        """The tokens of what a template rendered from escaped texts."""
        if _ESCAPE not in rendered:
            return encode(self._tokenizer, rendered)
        pieces = self._pattern.split(rendered)  # text and special token in turn
        return self._encode(
            SpecialToken(piece) if index % 2 else piece.replace(_ESCAPE, "")
            for index, piece in enumerate(pieces)
        )


def _escape_match(match: re.Match[str]) -> str:
    token = match[0]
    # Templates look for reasoning in the content of assistant messages.
    return token if token in (THINK, END_THINK) else token[0] + _ESCAPE + token[1:]
