"""make_renderer: the renderer a tokenizer needs, found by trying its template."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.chatml import END, NO_THOUGHT, START, ChatMLRenderer
from skyfleet.chat.jinja import JinjaRenderer, TemplateTokenizer, render_template
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.probes import QUESTION, SYSTEM, TALK, TOOLS, WORK
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.tokenizer import encode, single_token
from skyfleet.chat.tools_section import TOOLS_STYLES
from skyfleet.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

_SYSTEM_TURN = re.compile(rf"{re.escape(START)}system\n(.*?){re.escape(END)}\n", re.DOTALL)


def make_renderer(
    tokenizer: TemplateTokenizer,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools_style: str | None = None,
) -> Renderer:
    """ChatML by hand where it gives the template's own tokens, the template elsewhere.

    `tools_style` replaces how the template shows tools, ChatML only; a tokenizer may carry its
    own wish as `skyfleet_tools`.
    """
    kwargs = dict(chat_template_kwargs or {})
    style = tools_style or _wished_style(tokenizer)
    if style is not None and style not in TOOLS_STYLES:
        raise ConfigError(f"tools_style={style!r}; choose from {sorted(TOOLS_STYLES)}")
    chatml = _chatml(tokenizer, kwargs, style)
    if chatml is not None:
        logger.info("rendering ChatML by hand, tools as %s: every turn joins", style or "qwen")
        return chatml
    if style is not None:
        raise ConfigError(
            f"tools_style={style!r} needs a tokenizer whose template is ChatML, and this one's "
            "is not; leave tools_style out and the template shows the tools"
        )
    if tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer has neither a chat_template nor {START} and {END}; "
            "take an instruct model or set tokenizer.chat_template"
        )
    logger.info("rendering with the tokenizer's own chat template")
    return JinjaRenderer(tokenizer, chat_template_kwargs=kwargs)


def _wished_style(tokenizer: TemplateTokenizer) -> str | None:
    saved: Mapping[str, Any] = getattr(tokenizer, "init_kwargs", {})
    wish: str | None = getattr(tokenizer, "skyfleet_tools", saved.get("skyfleet_tools"))
    return wish


def _chatml(
    tokenizer: TemplateTokenizer, kwargs: Mapping[str, Any], style: str | None
) -> ChatMLRenderer | None:
    """A ChatMLRenderer that says what the template says, or None if there is none."""
    if single_token(tokenizer, START) is None or single_token(tokenizer, END) is None:
        return None
    write_tools = TOOLS_STYLES[style or "qwen"]
    if tokenizer.chat_template is None:
        enable_thinking = kwargs.get("enable_thinking")
        return ChatMLRenderer(tokenizer, write_tools=write_tools, enable_thinking=enable_thinking)
    probes: list[tuple[Sequence[Message], Sequence[ToolSpec]]] = [((QUESTION,), ()), (TALK, ())]
    if style is None:
        probes += [(WORK, ()), (WORK, TOOLS)]
    prompted = {**kwargs, "add_generation_prompt": True}
    try:
        opening = render_template(tokenizer, [QUESTION], **prompted)
        default_system = _SYSTEM_TURN.match(opening)
        renderer = ChatMLRenderer(
            tokenizer,
            write_tools=write_tools,
            default_system=default_system[1] if default_system else None,
            enable_thinking=False if opening.endswith(NO_THOUGHT) else None,
        )
        same = all(
            renderer.open(messages, tools)
            == encode(tokenizer, render_template(tokenizer, messages, tools, **prompted))
            for probe, tools in probes
            for messages in (probe, (SYSTEM, *probe))
        )
    except ModelError:
        return None
    return renderer if same else None
