"""Families: the formats written by hand, each fitted to a template by reading what it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skyfleet.chat.by_hand import HandWrittenRenderer
from skyfleet.chat.chatml import NO_THOUGHT, ChatMLRenderer
from skyfleet.chat.glm import GLMRenderer
from skyfleet.chat.harmony import HarmonyRenderer
from skyfleet.chat.kimi_k2 import KimiK2Renderer
from skyfleet.chat.llama3 import Llama3Renderer
from skyfleet.chat.message import Message
from skyfleet.chat.probes import ANSWER, CALL_BY_CALL, QUESTION, SYSTEM, TALK, TOOLS, WORK, Probe
from skyfleet.chat.template import Template
from skyfleet.chat.tool_calls.glm import parse_glm
from skyfleet.chat.tool_calls.harmony import parse_harmony
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.chat.tool_calls.kimi_k2 import parse_kimi_k2
from skyfleet.chat.tool_calls.llama3_json import parse_llama3_json
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.chat.tools_section import WriteTools, qwen_tools
from skyfleet.errors import ModelError

Fit = Callable[[Template, bool], HandWrittenRenderer]
"""From a template, and whether turns that lack their end are given one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    fit: Fit
    """The renderer, or ModelError where the tokenizer lacks the family's marks."""
    parse: ToolCallParser
    probes: Sequence[Probe]


def fitted(family: Family, template: Template, *, close_turns: bool) -> HandWrittenRenderer | None:
    """The family's renderer if it gives the template's own tokens on every probe."""
    try:
        renderer = family.fit(template, close_turns)
        same = all(
            renderer.open(messages, tools) == template.tokens(messages, tools)
            for probe, tools in family.probes
            for messages in (probe, (SYSTEM, *probe))
        )
    except ModelError:
        return None
    return renderer if same else None


def _between(before: str, after: str, text: str) -> str | None:
    found = re.search(f"{re.escape(before)}(.*?){re.escape(after)}", text, re.DOTALL)
    return found[1] if found else None


def fit_chatml(
    template: Template,
    close_turns: bool,
    *,
    write_tools: WriteTools = qwen_tools,
    parse: ToolCallParser = parse_hermes,
) -> ChatMLRenderer:
    opening = template.render([QUESTION])
    return ChatMLRenderer(
        template.tokenizer,
        write_tools=write_tools,
        parse=parse,
        default_system=_between("<|im_start|>system\n", "<|im_end|>\n", opening),
        enable_thinking=False if opening.endswith("".join(NO_THOUGHT)) else None,
        close_turns=close_turns,
    )


def _fit_llama3(template: Template, close_turns: bool) -> Llama3Renderer:
    # Read once: a run that lasts beyond midnight keeps the day it began.
    date = _between("Today Date: ", "\n\n", template.render([QUESTION]))
    return Llama3Renderer(template.tokenizer, date=date or "", close_turns=close_turns)


def _fit_kimi_k2(template: Template, close_turns: bool) -> KimiK2Renderer:
    opening = template.render([QUESTION], TOOLS)
    return KimiK2Renderer(
        template.tokenizer,
        default_system=_between("<|im_system|>system<|im_middle|>", "<|im_end|>", opening) or "",
        thinks=f"<think></think>{ANSWER.text}" in template.render(TALK),
        compact_tools='{"type":"function"' in opening,
        close_turns=close_turns,
    )


def _fit_glm(template: Template, close_turns: bool) -> GLMRenderer:
    # `close_turns` says nothing here: a turn's end is the next one's beginning.
    thinks = not template.render([QUESTION]).endswith("</think>")
    return GLMRenderer(template.tokenizer, enable_thinking=thinks)


def _fit_harmony(template: Template, close_turns: bool) -> HarmonyRenderer:
    opening = template.render([QUESTION])
    identity = _between("<|start|>system<|message|>", "<|end|>", opening)
    return HarmonyRenderer(template.tokenizer, identity=identity or "", close_turns=close_turns)


def _named_by_function(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The same conversation with call ids as Kimi K2 says them."""
    return tuple(
        replace(
            message,
            tool_calls=tuple(
                replace(call, id=call.id.replace("call_", "functions.look_up:"))
                for call in message.tool_calls
            ),
            tool_call_id=(message.tool_call_id or "").replace("call_", "functions.look_up:")
            or None,
        )
        for message in messages
    )


def _on(work: Sequence[Message]) -> tuple[Probe, ...]:
    return (((QUESTION,), ()), (TALK, ()), (work, ()), (work, TOOLS))


CHATML = Family(name="ChatML", fit=fit_chatml, parse=parse_hermes, probes=_on(WORK))
FAMILIES = (
    CHATML,
    Family(name="Llama 3", fit=_fit_llama3, parse=parse_llama3_json, probes=_on(CALL_BY_CALL)),
    Family(
        name="Kimi K2", fit=_fit_kimi_k2, parse=parse_kimi_k2, probes=_on(_named_by_function(WORK))
    ),
    Family(name="GLM", fit=_fit_glm, parse=parse_glm, probes=_on(WORK)),
    Family(name="Harmony", fit=_fit_harmony, parse=parse_harmony, probes=_on(CALL_BY_CALL)),
)
