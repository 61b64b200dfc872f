"""Tools section: how the system message tells a ChatML model what it can call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyfleet.chat.message import ToolSpec

WriteTools = Callable[[Sequence[ToolSpec]], str]

# Qwen was trained on these words: not one character of them is ours to improve.
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

_MOST_CHOICES = 3
"""A signature lists the values of a parameter up to so many: a longer list is no longer short."""


def qwen_tools(tools: Sequence[ToolSpec]) -> str:
    """Every tool with its whole schema, in Qwen's own words."""
    schemas = "\n".join(json.dumps(function_schema(tool), ensure_ascii=False) for tool in tools)
    return QWEN_BEFORE + schemas + QWEN_AFTER


def signature_tools(tools: Sequence[ToolSpec]) -> str:
    """One line a tool, for models whose context is small."""
    return "\n".join(["Tools:", *map(_signature, tools), _CALL_FORMAT])


TOOLS_STYLES: dict[str, WriteTools] = {"qwen": qwen_tools, "signatures": signature_tools}


def function_schema(tool: ToolSpec) -> dict[str, Any]:
    """The tool as OpenAI's chat API and every chat template spell it."""
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
    return f"{name}: {'|'.join(choices)}" if 0 < len(choices) <= _MOST_CHOICES else name
