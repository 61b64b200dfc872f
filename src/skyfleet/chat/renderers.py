"""make_renderer: choose the renderer for a tokenizer by comparing it with the chat template."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from skyfleet.chat.chatml import END, START, ChatMLRenderer
from skyfleet.chat.glm import GLMRenderer
from skyfleet.chat.harmony import HarmonyRenderer
from skyfleet.chat.jinja import JinjaRenderer
from skyfleet.chat.kimi_k2 import KimiK2Renderer
from skyfleet.chat.lenient_renderer import LenientRenderer
from skyfleet.chat.llama3 import Llama3Renderer
from skyfleet.chat.message import Message
from skyfleet.chat.renderer import BuiltinRenderer, Renderer
from skyfleet.chat.template import Template, TemplateTokenizer, load_template
from skyfleet.chat.template_checks import (
    QUESTION,
    SINGLE_CALL_DIALOGUE,
    SYSTEM,
    TEXT_DIALOGUE,
    TOOL_DIALOGUE,
    TOOLS,
    Probe,
    find_generation_mask_mismatch,
    parses_hermes,
    with_reasoning,
)
from skyfleet.chat.tool_calls.formats import detect_parser, get_parser
from skyfleet.chat.tool_calls.glm import parse_glm
from skyfleet.chat.tool_calls.harmony import parse_harmony
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.chat.tool_calls.kimi_k2 import parse_kimi_k2
from skyfleet.chat.tool_calls.llama3_json import parse_llama3_json
from skyfleet.chat.tool_calls.parser import ToolCallParser
from skyfleet.chat.tool_prompt import TOOLS_STYLES
from skyfleet.config.generator import Generator
from skyfleet.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)


class FromTemplate(Protocol):
    def __call__(self, template: Template, *, close_turns: bool) -> BuiltinRenderer:
        """Raises ModelError if the tokenizer lacks the format's special tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    name: str
    from_template: FromTemplate
    parse: ToolCallParser
    probes: Sequence[Probe]


def make_renderer(
    tokenizer: TemplateTokenizer,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tool_call_parser: str | None = None,
    tools_style: str | None = None,
    close_turns: bool = True,
) -> Renderer:
    """A built-in renderer if it produces the template's own tokens, else a JinjaRenderer.

    `chat_template` replaces the tokenizer's own. `tool_call_parser` names the parser of tool calls;
    by default it is detected from the template. `tools_style` replaces how the template lists the
    tools (ChatML only); a tokenizer may store it as `skyfleet_tools`. With `close_turns=False` a turn
    that was cut by length or by a stop string gets no end token.
    """
    kwargs = dict(chat_template_kwargs or {})
    template = Template(tokenizer=tokenizer, source=chat_template, kwargs=kwargs)
    _warn_unused_kwargs(template)
    parser = tool_call_parser or detect_parser(template.text)
    parse = get_parser(parser or "hermes")
    # The stored style belongs to the tokenizer's own template.
    style = tools_style or (None if chat_template else _saved_tools_style(tokenizer))
    if style is not None and style not in TOOLS_STYLES:
        raise ConfigError(f"tools_style={style!r}; choose from {sorted(TOOLS_STYLES)}")
    if tool_call_parser and (style is not None or not template.text) and not parses_hermes(parse):
        raise ConfigError(
            f"generator.tool_call_parser={tool_call_parser!r} with tools_style={style or 'qwen'!r}: "
            "the prompt asks the model to call tools in Hermes format; leave tool_call_parser out"
        )
    if not template.text:
        return _build_without_template(template, style or "qwen", parse, close_turns=close_turns)
    if style is not None:
        formats: Sequence[ChatFormat] = (_chatml_with_tools_style(style, parse),)
    else:
        formats = [f for f in BUILTIN_FORMATS if tool_call_parser is None or f.parse == parse]
    renderer: Renderer | None = _match_builtin(formats, template, close_turns=close_turns)
    if renderer is None and style is not None:
        raise ConfigError(
            f"tools_style={style!r} requires a tokenizer with a ChatML template, but this template "
            "is another; leave tools_style out to list the tools as the template does"
        )
    if renderer is None and parse == get_parser("harmony"):
        raise ModelError(
            "tool calls are in gpt-oss format, but the chat template does not produce gpt-oss's "
            "tokens, so a call would not end its turn; set generator.chat_template.name_or_path to "
            "gpt-oss's template, or choose another generator.tool_call_parser"
        )
    if renderer is None:
        logger.info("rendering with the Jinja chat template, tool calls as %s", parser or "hermes")
        renderer = JinjaRenderer(
            template,
            parse=parse if parser else None,
            is_parser_configured=tool_call_parser is not None,
            close_turns=close_turns,
        )
    mismatch = find_generation_mask_mismatch(template, renderer)
    if mismatch:
        logger.warning("%s", mismatch)
    return renderer


def _warn_unused_kwargs(template: Template) -> None:
    # Without a template ChatML reads enable_thinking only.
    known = re.findall(r"\w+", template.text) if template.text else ["enable_thinking"]
    for key, value in template.kwargs.items():
        if key not in known:
            logger.warning(
                "generator.chat_template_kwargs.%s=%r has no effect: the chat template does not "
                "mention it; correct its name or leave it out",
                key,
                value,
            )


def _match_builtin(
    formats: Sequence[ChatFormat], template: Template, *, close_turns: bool
) -> BuiltinRenderer | None:
    """The first built-in renderer that produces the template's tokens on all of its probes."""
    for chat_format in formats:
        probes = tuple(chat_format.probes)
        if template.source is not None:
            # A template that the user configured also decides what happens to old reasoning.
            probes += tuple((with_reasoning(messages), tools) for messages, tools in probes)
        try:
            renderer = chat_format.from_template(template, close_turns=close_turns)
            is_equal = all(
                renderer.render_prompt(messages, tools) == template.tokenize(messages, tools)
                for probe, tools in probes
                for messages in (probe, (SYSTEM, *probe))
            )
        except ModelError:
            continue
        if is_equal:
            logger.info("built-in %s renderer: every turn is append-only", chat_format.name)
            return renderer
    return None


def _saved_tools_style(tokenizer: TemplateTokenizer) -> str | None:
    saved: Mapping[str, Any] = getattr(tokenizer, "init_kwargs", {})
    style: str | None = getattr(tokenizer, "skyfleet_tools", saved.get("skyfleet_tools"))
    return style


def _chatml_with_tools_style(style: str, parse: ToolCallParser) -> ChatFormat:
    """ChatML with our own tool list: the probes compare only messages without tools."""
    return ChatFormat(
        name=f"ChatML with tools_style={style}",
        from_template=partial(
            ChatMLRenderer.from_template, render_tools=TOOLS_STYLES[style], parse=parse
        ),
        parse=parse_hermes,
        probes=(((QUESTION,), ()), (TEXT_DIALOGUE, ())),
    )


def _build_without_template(
    template: Template, style: str, parse: ToolCallParser, *, close_turns: bool
) -> ChatMLRenderer:
    try:
        return ChatMLRenderer(
            template.tokenizer,
            render_tools=TOOLS_STYLES[style],
            parse=parse,
            enable_thinking=template.kwargs.get("enable_thinking"),
            close_turns=close_turns,
        )
    except ModelError as error:
        raise ModelError(
            f"the tokenizer has neither a chat_template nor the tokens {START} and {END}; "
            "use an instruct model or set generator.chat_template.name_or_path"
        ) from error


def _with_kimi_ids(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The same conversation with call ids as Kimi K2 writes them."""
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


def _probes(dialogue: Sequence[Message]) -> tuple[Probe, ...]:
    return (((QUESTION,), ()), (TEXT_DIALOGUE, ()), (dialogue, ()), (dialogue, TOOLS))


BUILTIN_FORMATS = (
    ChatFormat(
        name="ChatML",
        from_template=ChatMLRenderer.from_template,
        parse=parse_hermes,
        probes=_probes(TOOL_DIALOGUE),
    ),
    ChatFormat(
        name="Llama 3",
        from_template=Llama3Renderer.from_template,
        parse=parse_llama3_json,
        probes=_probes(SINGLE_CALL_DIALOGUE),
    ),
    ChatFormat(
        name="Kimi K2",
        from_template=KimiK2Renderer.from_template,
        parse=parse_kimi_k2,
        probes=_probes(_with_kimi_ids(TOOL_DIALOGUE)),
    ),
    ChatFormat(
        name="GLM",
        from_template=GLMRenderer.from_template,
        parse=parse_glm,
        probes=_probes(TOOL_DIALOGUE),
    ),
    ChatFormat(
        name="Harmony",
        from_template=HarmonyRenderer.from_template,
        parse=parse_harmony,
        probes=_probes(SINGLE_CALL_DIALOGUE),
    ),
)


def build_renderer(generator: Generator, tokenizer: Any) -> Renderer:
    """The renderer of a run."""
    template = generator.chat_template
    renderer = make_renderer(
        tokenizer,
        chat_template=load_template(template.source, template.name_or_path),
        chat_template_kwargs=generator.chat_template_kwargs,
        tool_call_parser=generator.tool_call_parser,
        close_turns=generator.append_eos_token_after_stop_str_in_multi_turn,
    )
    if generator.tool_call_parsing == "strict":
        return renderer
    return LenientRenderer(renderer, log=generator.log_tool_call_repairs)
