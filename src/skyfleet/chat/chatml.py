"""ChatMLRenderer: the chat format of Qwen2.5, Qwen3 and SmolLM2.

Qwen3's template drops the reasoning before the last user message, so it rewrites the past while the
agent works. This renderer keeps reasoning as it was sampled, with and without `enable_thinking`, and
every turn can be continued. On a conversation without reasoning the tokens equal the template's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from skyfleet.chat.message import Message, ToolSpec, extract_text
from skyfleet.chat.renderer import BuiltinRenderer, find_between
from skyfleet.chat.template import Template
from skyfleet.chat.template_checks import QUESTION
from skyfleet.chat.tokenizer import END_THINK, THINK, SpecialToken, Tokenizer
from skyfleet.chat.tool_calls.hermes import parse_hermes, write_hermes
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.chat.tool_prompt import RenderTools, render_qwen_tools

START, END = SpecialToken("<|im_start|>"), SpecialToken("<|im_end|>")
END_OF_TEXT = SpecialToken("<|endoftext|>")
EMPTY_REASONING = (THINK, "\n\n", END_THINK, "\n\n")


class ChatMLRenderer(BuiltinRenderer):
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        render_tools: RenderTools = render_qwen_tools,
        parse: ToolCallParser = parse_hermes,
        default_system: str | None = None,
        enable_thinking: bool | None = None,
        close_turns: bool = True,
    ) -> None:
        """`default_system` is used if the conversation has no system message, as in Qwen2.5.

        `enable_thinking=False` adds empty reasoning to the generation prompt, as Qwen3's template
        does.
        """
        super().__init__(
            tokenizer,
            parse=parse,
            required_tokens=(START, END),
            # A base model emits <|endoftext|> instead of <|im_end|>.
            stop_tokens=(END, END_OF_TEXT),
            turn_ends=(END,),
            close_turns=close_turns,
        )
        self._render_tools, self._default_system = render_tools, default_system
        self._prefill = EMPTY_REASONING if enable_thinking is False else ()

    @classmethod
    def from_template(
        cls,
        template: Template,
        *,
        close_turns: bool,
        render_tools: RenderTools = render_qwen_tools,
        parse: ToolCallParser = parse_hermes,
    ) -> ChatMLRenderer:
        prompt = template.render([QUESTION])
        return cls(
            template.tokenizer,
            render_tools=render_tools,
            parse=parse,
            default_system=find_between("<|im_start|>system\n", "<|im_end|>\n", prompt),
            enable_thinking=False if prompt.endswith("".join(EMPTY_REASONING)) else None,
            close_turns=close_turns,
        )

    def _render_conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Iterator[str]:
        system, rest = self._default_system, messages
        if messages and messages[0].role == "system":
            system, rest = extract_text(messages[0]), messages[1:]
        if tools:
            section = self._render_tools(tools)
            system = section if system is None else f"{system}\n\n{section}"
        if system is not None:
            yield from (START, "system\n", system, END, "\n")
        yield from _render_turns(rest)

    def _render_messages(self, messages: Sequence[Message]) -> Iterator[str]:
        yield "\n"
        yield from _render_turns(messages)

    def _generation_prompt(self) -> tuple[str, ...]:
        return (START, "assistant\n", *self._prefill)

    def _render_turn(self, message: Message) -> Iterator[str]:
        return _render_assistant(message)


def _render_turns(messages: Sequence[Message]) -> Iterator[str]:
    for role, run in groupby(messages, lambda message: message.role):
        if role == "tool":
            yield from (START, "user\n", "\n".join(map(_render_result, run)), END, "\n")
        elif role == "assistant":
            for message in run:
                yield from (START, "assistant\n", *_render_assistant(message), "\n")
        else:
            for message in run:
                yield from (START, role, "\n", extract_text(message), END, "\n")


def _render_result(message: Message) -> str:
    return f"<tool_response>\n{extract_text(message)}\n</tool_response>"


def _render_assistant(message: Message) -> Iterator[str]:
    if message.reasoning is not None:
        yield from (THINK, "\n", message.reasoning, "\n", END_THINK, "\n\n")
    text = extract_text(message)
    yield text
    if message.tool_calls:
        yield from ("\n" if text else "", *write_hermes(message.tool_calls))
    malformed = "\n".join(message.malformed_calls)
    yield f"\n{malformed}" if malformed and (text or message.tool_calls) else malformed
    yield END
