"""Tool-call formats by name, and which of them a chat template uses."""

from __future__ import annotations

from dataclasses import dataclass

from skyfleet.chat.tool_calls.glm import parse_glm, write_glm
from skyfleet.chat.tool_calls.harmony import parse_harmony, write_harmony
from skyfleet.chat.tool_calls.hermes import parse_hermes, write_hermes
from skyfleet.chat.tool_calls.kimi_k2 import parse_kimi_k2, write_kimi_k2
from skyfleet.chat.tool_calls.llama3_json import (
    parse_json_object,
    parse_llama3_json,
    write_json_object,
    write_llama3_json,
)
from skyfleet.chat.tool_calls.mistral import parse_mistral, write_mistral
from skyfleet.chat.tool_calls.parser import ToolCallParser, ToolCallWriter
from skyfleet.chat.tool_calls.pythonic import parse_pythonic, write_pythonic
from skyfleet.chat.tool_calls.qwen3_coder import parse_qwen3_coder, write_qwen3_coder
from skyfleet.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    parse: ToolCallParser
    write: ToolCallWriter


FORMATS = {
    "glm": ToolCallFormat(parse=parse_glm, write=write_glm),
    "harmony": ToolCallFormat(parse=parse_harmony, write=write_harmony),
    "hermes": ToolCallFormat(parse=parse_hermes, write=write_hermes),
    "json_object": ToolCallFormat(parse=parse_json_object, write=write_json_object),
    "kimi_k2": ToolCallFormat(parse=parse_kimi_k2, write=write_kimi_k2),
    "llama3_json": ToolCallFormat(parse=parse_llama3_json, write=write_llama3_json),
    "mistral": ToolCallFormat(parse=parse_mistral, write=write_mistral),
    "pythonic": ToolCallFormat(parse=parse_pythonic, write=write_pythonic),
    "qwen3_coder": ToolCallFormat(parse=parse_qwen3_coder, write=write_qwen3_coder),
}

VLLM_NAMES = {
    "glm45": "glm",
    "glm47": "glm",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
    "qwen3_xml": "qwen3_coder",
}
"""vLLM's names for the same parsers, so that vLLM recipes work unchanged."""

# The first row counts whose strings all occur in the template: many formats use <tool_call>.
_TEMPLATE_STRINGS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ('{"name": function name, "parameters": ',)),
)


def get_parser(name: str) -> ToolCallParser:
    return _get_format(name).parse


def detect_parser(chat_template: str) -> str | None:
    """The name of the parser for models with this template; None if the format is unknown."""
    for name, strings in _TEMPLATE_STRINGS:
        if all(string in chat_template for string in strings):
            return name
    return None


def _get_format(name: str) -> ToolCallFormat:
    known = FORMATS.get(VLLM_NAMES.get(name, name))
    if known is None:
        choices = sorted([*FORMATS, *VLLM_NAMES])
        raise ConfigError(f"generator.tool_call_parser={name!r}; choose from {choices}")
    return known
