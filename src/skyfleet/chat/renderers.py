"""Choose the renderer for a tokenizer by comparing it with the tokenizer's chat template."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skyfleet.chat.chatml import END, NO_THOUGHT, START, ChatMLRenderer
from skyfleet.chat.glm import GLMRenderer
from skyfleet.chat.harmony import HarmonyRenderer
from skyfleet.chat.jinja import JinjaRenderer
from skyfleet.chat.kimi_k2 import KimiK2Renderer
from skyfleet.chat.llama3 import Llama3Renderer
from skyfleet.chat.message import Message
from skyfleet.chat.renderer import HandWrittenRenderer, Renderer
from skyfleet.chat.template import Template, TemplateTokenizer
from skyfleet.chat.template_checks import (
    ANSWER,
    CALL_BY_CALL,
    QUESTION,
    SYSTEM,
    TALK,
    TOOLS,
    WORK,
    Probe,
    reads_hermes,
    thoughtful,
    why_marks_differ,
)
from skyfleet.chat.tool_calls.formats import detect_parser, parser_named
from skyfleet.chat.tool_calls.glm import parse_glm
from skyfleet.chat.tool_calls.harmony import parse_harmony
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.chat.tool_calls.kimi_k2 import parse_kimi_k2
from skyfleet.chat.tool_calls.llama3_json import parse_llama3_json
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.chat.tools_section import TOOLS_STYLES, WriteTools, qwen_tools
from skyfleet.errors import ConfigError, ModelError

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


logger = logging.getLogger(__name__)


def make_renderer(
    tokenizer: TemplateTokenizer,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tool_call_parser: str | None = None,
    tools_style: str | None = None,
    close_turns: bool = True,
) -> Renderer:
    """By hand where that gives the template's own tokens, through the template elsewhere.

    `chat_template` stands in for the tokenizer's own. `tool_call_parser` reads the calls; left out,
    the template tells which. `tools_style` replaces how the template shows tools, ChatML only; a
    tokenizer may carry its own wish as `skyfleet_tools`. With `close_turns=False` a turn that its
    length or a stop string ended stays without its end.
    """
    kwargs = dict(chat_template_kwargs or {})
    template = Template(tokenizer=tokenizer, source=chat_template, kwargs=kwargs)
    _tell_idle_settings(template)
    parser = tool_call_parser or detect_parser(template.text)
    parse = parser_named(parser or "hermes")
    # What a tokenizer wishes is of its own template.
    style = tools_style or (None if chat_template else _wished_style(tokenizer))
    if style is not None and style not in TOOLS_STYLES:
        raise ConfigError(f"tools_style={style!r}; choose from {sorted(TOOLS_STYLES)}")
    if tool_call_parser and (style is not None or not template.text) and not reads_hermes(parse):
        raise ConfigError(
            f"generator.tool_call_parser={tool_call_parser!r} with tools shown as "
            f"{style or 'qwen'!r}: the model is told to call as Hermes does; leave it out"
        )
    if not template.text:
        return _without_template(template, style or "qwen", parse, close_turns=close_turns)
    if style is not None:
        families: Sequence[Family] = (_styled(style, parse),)
    else:
        families = [f for f in FAMILIES if tool_call_parser is None or f.parse == parse]
    renderer: Renderer | None = _by_hand(families, template, close_turns=close_turns)
    if renderer is None and style is not None:
        raise ConfigError(
            f"tools_style={style!r} needs a tokenizer whose template is ChatML, and this one's "
            "is not; leave tools_style out and the template shows the tools"
        )
    if renderer is None and parse == parser_named("harmony"):
        raise ModelError(
            "calls are to be read as gpt-oss writes them, and the chat template gives other tokens "
            "than gpt-oss's own: a call would not end its turn; set "
            "generator.chat_template.name_or_path to gpt-oss's template, or another "
            "generator.tool_call_parser"
        )
    if renderer is None:
        logger.info("rendering with the chat template itself, calls read as %s", parser or "hermes")
        renderer = JinjaRenderer(
            template,
            parse=parse if parser else None,
            parse_is_named=tool_call_parser is not None,
            close_turns=close_turns,
        )
    difference = why_marks_differ(template, renderer)
    if difference:
        logger.warning("%s", difference)
    return renderer


def _tell_idle_settings(template: Template) -> None:
    # ChatML without a template knows the one; a template knows none but of its words.
    known = re.findall(r"\w+", template.text) if template.text else ["enable_thinking"]
    for key, value in template.kwargs.items():
        if key not in known:
            logger.warning(
                "generator.chat_template_kwargs.%s=%r does nothing: the chat template does not "
                "mention it; correct its name or leave it out",
                key,
                value,
            )


def _by_hand(
    families: Sequence[Family], template: Template, *, close_turns: bool
) -> HandWrittenRenderer | None:
    for family in families:
        if template.source is not None:
            # Whoever brings a template means what it does with old thoughts, too.
            family = replace(family, probes=_with_thoughts(family.probes))
        renderer = fitted(family, template, close_turns=close_turns)
        if renderer is not None:
            logger.info("rendering %s by hand: every turn joins", family.name)
            return renderer
    return None


def _with_thoughts(probes: Sequence[Probe]) -> tuple[Probe, ...]:
    return (*probes, *((thoughtful(messages), tools) for messages, tools in probes))


def _wished_style(tokenizer: TemplateTokenizer) -> str | None:
    saved: Mapping[str, Any] = getattr(tokenizer, "init_kwargs", {})
    wish: str | None = getattr(tokenizer, "skyfleet_tools", saved.get("skyfleet_tools"))
    return wish


def _styled(style: str, parse: ToolCallParser) -> Family:
    """ChatML with tools shown in our way: the template is only asked about the rest."""
    fit = partial(fit_chatml, write_tools=TOOLS_STYLES[style], parse=parse)
    name = f"ChatML with tools as {style}"
    return replace(CHATML, name=name, fit=fit, probes=(((QUESTION,), ()), (TALK, ())))


def _without_template(
    template: Template, style: str, parse: ToolCallParser, *, close_turns: bool
) -> ChatMLRenderer:
    try:
        return ChatMLRenderer(
            template.tokenizer,
            write_tools=TOOLS_STYLES[style],
            parse=parse,
            enable_thinking=template.kwargs.get("enable_thinking"),
            close_turns=close_turns,
        )
    except ModelError as error:
        raise ModelError(
            f"the tokenizer has neither a chat_template nor {START} and {END}; "
            "take an instruct model or set generator.chat_template.name_or_path"
        ) from error
