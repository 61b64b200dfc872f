"""JinjaRenderer: any Hugging Face chat template, trusted to join turns only after proof.

A template sees the whole conversation and may rewrite its past: drop old thoughts, move the tools
to the last question. The renderer tries it on probes, and where the past does not stand still
`append_only` is False, `reason` says why, and each turn opens a new transcript. Where it writes
calls in a way that would not be read, tools are refused.

What a message spells stays text, as with renderers by hand; only `<think>` may become a mark.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.pieces import END_THINK, THINK, Mark, PieceEncoder
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.template import RefusedConversationError, Template, TemplateTokenizer
from skyfleet.chat.template_checks import (
    ANSWER,
    CALL,
    CALL_BY_CALL,
    QUESTION,
    TALK,
    TOOLS,
    WORK,
    handed_as_taken,
    thoughtful,
    why_unread,
)
from skyfleet.chat.text_only import thought_aloud
from skyfleet.chat.tokenizer import decode, encode
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.errors import EngineError, ModelError, SkyfleetError


def why_not_append_only(renderer: Renderer, work: Sequence[Message]) -> str | None:
    """Play `work` turn by turn, in words, with tools and with thoughts; None: all of it joins."""
    try:
        for messages, tools in ((TALK, ()), (work, TOOLS), (thoughtful(work), TOOLS)):
            spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
            for start, stop in zip(spoken, [*spoken[1:], len(messages)], strict=True):
                said = renderer.write(messages[start])
                glue = renderer.join(said[-1], messages[start + 1 : stop])
                before = renderer.open(messages[:start], tools)
                if glue is None or before + said + glue != renderer.open(messages[:stop], tools):
                    heard = ", ".join(message.role for message in messages[:stop])
                    return f"the chat template gives {heard} other tokens than turn by turn"
    except SkyfleetError as error:
        return str(error)
    return None


_INSIDE = "\ufdd0"  # a noncharacter of Unicode: no text holds it


class Guard:
    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        longest_first = sorted(special, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._tokenizer, self._encode = tokenizer, PieceEncoder(tokenizer)

    def spell(self, text: str) -> str:
        return self._marks.sub(_broken_up, text)

    def encode(self, rendered: str) -> list[int]:
        """The tokens of what a template made of spelled texts."""
        if _INSIDE not in rendered:
            return encode(self._tokenizer, rendered)
        pieces = self._marks.split(rendered)  # a text and a mark in turn
        return self._encode(
            Mark(piece) if is_mark % 2 else piece.replace(_INSIDE, "")
            for is_mark, piece in enumerate(pieces)
        )


def _broken_up(found: re.Match[str]) -> str:
    mark = found[0]
    # Templates look for thoughts in what the assistant said.
    return mark if mark in (THINK, END_THINK) else mark[0] + _INSIDE + mark[1:]


logger = logging.getLogger(__name__)


class JinjaRenderer:
    append_only: bool
    reason: str | None
    """Why turns cannot be joined; None when they can."""

    def __init__(
        self,
        template: Template,
        *,
        parse: ToolCallParser | None = None,
        parse_is_named: bool = False,
        close_turns: bool = True,
    ) -> None:
        """Without `parse` calls are read as Hermes's, if the template writes such.

        `parse_is_named`: by somebody who may know the model better than its template does.
        """
        self._parse, self._close_turns = parse or parse_hermes, close_turns
        self._template = template = handed_as_taken(template, self._parse)
        self._tokenizer = template.tokenizer
        self._guard = Guard(template.tokenizer)
        # Some keep the thoughts of turns that call and drop those of answers.
        self._writes_reasoning = any(
            "Birds." in template.render([QUESTION, replace(said, reasoning="Birds.")], prompt=False)
            for said in (ANSWER, CALL)
        )
        self._opens_thought = self._render([QUESTION]).rstrip().endswith(THINK)
        own, others = self._first_mark([]), self._next_speakers()
        ends = (own, self._tokenizer.eos_token_id, *others)
        self.stop_token_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
        if not self.stop_token_ids:
            raise ModelError(
                "the chat template ends an assistant turn without a special token, and the "
                "tokenizer has no eos_token to stop at; give a chat_template that ends turns with one"
            )
        self._end = self.stop_token_ids[0]
        self._end_text = decode(self._tokenizer, [self._end]) if own is not None else ""
        self.append_only = True  # until tried: the proof joins as everyone will
        self._unread: str | None = None
        self.reason = (
            "the chat template ends an assistant turn without a special token"
            if own is None
            else why_not_append_only(self, CALL_BY_CALL if self._refuses(WORK) else WORK)
        )
        self.append_only = self.reason is None
        self._unread = why_unread(
            template, self._parse, is_guess=parse is None, is_named=parse_is_named
        )
        if not self.append_only:
            logger.warning("every turn will open a new transcript: %s", self.reason)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        try:
            text = self._render(messages, tools)
        except RefusedConversationError as error:
            # Two calls in a turn, say: what a model says may end its episode, never the run.
            if any(message.role == "assistant" for message in messages):
                raise EngineError(str(error)) from error
            raise
        hidden = [tool.name for tool in tools if tool.name not in text]
        if hidden:
            raise ModelError(
                f"the chat template does not show the tools {hidden}; "
                "give generator.chat_template one that does"
            )
        if tools and self._unread:
            raise ModelError(self._unread)
        return self._guard.encode(text)

    def join(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        glue = self._glue(messages) if self.append_only else None
        is_closed = last_token == self._end or not self._close_turns
        return glue[1:] if glue and is_closed else glue

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        text = self.text(token_ids[:-1] if ended else token_ids)
        return self._parse(THINK + text if self._opens_thought else text, tools).message

    def write(self, message: Message) -> list[int]:
        prompt = self._render([QUESTION])
        text = self._up_to_end([QUESTION, message])
        if not text.startswith(prompt):
            raise ModelError(
                "the chat template's generation prompt is not how its assistant turns begin; "
                "give a chat_template where it is"
            )
        token_ids = self._guard.encode(text.removeprefix(prompt))
        return token_ids if self._end_text else [*token_ids, self._end]

    def text(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool = True
    ) -> str:
        if not self._writes_reasoning:
            messages = [
                replace(message, reasoning=None, content=thought_aloud(message))
                for message in messages
            ]
        return self._template.render(messages, tools, prompt=prompt, spell=self._guard.spell)

    def _first_mark(self, heard: Sequence[Message]) -> int | None:
        """The first special token behind an answer, with `heard` after it."""
        after = self._render([QUESTION, ANSWER, *heard], prompt=False).rpartition(ANSWER.text)[2]
        added = self._tokenizer.added_tokens_decoder
        return next((token for token in self._guard.encode(after) if token in added), None)

    def _next_speakers(self) -> list[int | None]:
        """How the next one's words begin: where a turn has no end of its own, that ends it."""
        if self._first_mark([]) is not None:
            return []
        result = Message(role="tool", content="seen", tool_call_id="call_0")
        said = ([Message(role="user", content="go on")], [result])
        return [
            self._first_mark(heard)
            for heard in said
            if not self._refuses([QUESTION, ANSWER, *heard])
        ]

    def _up_to_end(self, messages: Sequence[Message]) -> str:
        """The conversation up to and with the end of its last turn."""
        if not self._end_text:
            return self._render(messages, prompt=False)
        before, end, _ = self._render(messages, prompt=False).rpartition(self._end_text)
        return before + end

    def _glue(self, messages: Sequence[Message]) -> list[int] | None:
        """The end of some assistant turn, and what the template adds after it."""
        # No tool of anybody's: a template that repeats the name of the call cannot be joined.
        calls = tuple(
            ToolCall(id=message.tool_call_id or f"call_{i}", name="some_tool", arguments={})
            for i, message in enumerate(messages)
            if message.role == "tool"
        )
        base = [QUESTION, replace(ANSWER, tool_calls=calls)]
        if self._refuses(base):
            base = [QUESTION, Message(role="assistant", tool_calls=calls[:1])]
        before = self._up_to_end(base)
        whole = self._render([*base, *messages])
        if not whole.startswith(before):
            return None
        return self._guard.encode(self._end_text + whole.removeprefix(before))

    def _refuses(self, messages: Sequence[Message]) -> bool:
        try:
            self._render(messages, prompt=False)
        except RefusedConversationError:
            return True
        return False
