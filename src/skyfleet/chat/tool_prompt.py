"""Render the tools section of a ChatML system message."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyfleet.chat.message import ToolSpec

RenderTools = Callable[[Sequence[ToolSpec]], str]

# Qwen was trained on this exact text; do not change a character.
QWEN_BEFORE = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
QWEN_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

_CALL_FORMAT = 'To call: <tool_call>{"name": ..., "arguments": {...}}</tool_call>'

_MAX_CHOICES = 3
"""A signature lists the enum of a parameter if it has at most this many values."""


def render_qwen_tools(tools: Sequence[ToolSpec]) -> str:
    """Every tool with its whole JSON schema, in Qwen's text."""
    schemas = "\n".join(json.dumps(to_openai_tool(tool), ensure_ascii=False) for tool in tools)
    return QWEN_BEFORE + schemas + QWEN_AFTER


def render_tool_signatures(tools: Sequence[ToolSpec]) -> str:
    """One line per tool, for models with a small context."""
    return "\n".join(["Tools:", *map(_signature, tools), _CALL_FORMAT])


TOOLS_STYLES: dict[str, RenderTools] = {
    "qwen": render_qwen_tools,
    "signatures": render_tool_signatures,
}


def to_openai_tool(tool: ToolSpec) -> dict[str, Any]:
    """The tool in the format of OpenAI's chat API, which chat templates use too."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }


def _signature(tool: ToolSpec) -> str:
    properties: Mapping[str, Mapping[str, Any]] = tool.parameters.get("properties", {})
    parameters = ", ".join(_parameter(name, schema) for name, schema in properties.items())
    return f"{tool.name}({parameters}) {' '.join(tool.description.split())}".rstrip()


def _parameter(name: str, schema: Mapping[str, Any]) -> str:
    choices = [json.dumps(choice, ensure_ascii=False) for choice in schema.get("enum", ())]
    return f"{name}: {'|'.join(choices)}" if 0 < len(choices) <= _MAX_CHOICES else name
