"""Load the chat template that `generator.chat_template` configures."""

from __future__ import annotations

import json
from pathlib import Path

from skyfleet.chat.tools_section import QWEN_AFTER, QWEN_BEFORE
from skyfleet.errors import ConfigError

_QWEN3 = r"""
{%- set system = messages[0].content if messages[0].role == 'system' %}
{%- if tools or system is defined %}
    {{- '<|im_start|>system\n' }}
    {{- system if system is defined }}
    {{- '\n\n' if tools and system is defined }}
    {%- if tools %}
        {{- BEFORE_TOOLS }}
        {%- for tool in tools %}
            {{- tool | tojson + ('' if loop.last else '\n') }}
        {%- endfor %}
        {{- AFTER_TOOLS }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
            {%- if message.reasoning_content is defined REASONING_CONDITION %}
                {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
            {%- endif %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}
                {{- '\n' if message.content or not loop.first }}
                {{- '<tool_call>\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
                {{- call.function.arguments | tojson + '}\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index].role != 'tool' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}
""".replace("BEFORE_TOOLS", json.dumps(QWEN_BEFORE)).replace("AFTER_TOOLS", json.dumps(QWEN_AFTER))

NAMED = {
    "qwen3_with_thinking": _QWEN3.replace("REASONING_CONDITION", ""),
    "qwen3_without_thinking": _QWEN3.replace("REASONING_CONDITION", "and loop.last"),
}
"""SkyRL's names. The first keeps all reasoning in context, the second that of the last turn only."""


def read_template(source: str, name_or_path: str | None) -> str | None:
    """The template source, or None for the tokenizer's own. `source` is name or file, as in SkyRL."""
    if name_or_path is None:
        return None
    key = f"generator.chat_template.name_or_path={name_or_path!r}"
    if source == "file":
        try:
            return Path(name_or_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{key} cannot be read: {error}; set it to the path of a Jinja file"
            ) from error
    if name_or_path not in NAMED:
        known = sorted(NAMED)
        raise ConfigError(f"{key}; choose from {known}, or set generator.chat_template.source=file")
    return NAMED[name_or_path]
