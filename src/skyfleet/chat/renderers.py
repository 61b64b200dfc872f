"""make_renderer: the renderer a tokenizer needs, found by trying its template."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from skyfleet.chat.by_hand import HandWrittenRenderer
from skyfleet.chat.calls_read_back import reads_hermes
from skyfleet.chat.chatml import END, START, ChatMLRenderer
from skyfleet.chat.families import CHATML, FAMILIES, Family, fit_chatml, fitted
from skyfleet.chat.generation_marks import why_marks_differ
from skyfleet.chat.jinja import JinjaRenderer
from skyfleet.chat.probes import QUESTION, TALK, Probe, thoughtful
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.template import Template, TemplateTokenizer
from skyfleet.chat.tool_calls.formats import detect_parser, parser_named
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.chat.tools_section import TOOLS_STYLES
from skyfleet.errors import ConfigError, ModelError

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
