"""Formats: a tool-call parser and writer by name, or by what a chat template mentions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tool_calls.glm import parse_glm, write_glm
from skyfleet.chat.tool_calls.hermes import parse_hermes, write_hermes
from skyfleet.chat.tool_calls.json_object import parse_json_object, write_json_object
from skyfleet.chat.tool_calls.kimi_k2 import parse_kimi_k2, write_kimi_k2
from skyfleet.chat.tool_calls.llama3_json import parse_llama3_json, write_llama3_json
from skyfleet.chat.tool_calls.mistral import parse_mistral, write_mistral
from skyfleet.chat.tool_calls.parser import ToolCallParser, ToolCallWriter
from skyfleet.chat.tool_calls.pythonic import parse_pythonic, write_pythonic
from skyfleet.chat.tool_calls.qwen3_coder import parse_qwen3_coder, write_qwen3_coder
from skyfleet.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    parse: ToolCallParser
    write: ToolCallWriter


FORMATS = {
    "glm": ToolCallFormat(parse_glm, write_glm),
    "hermes": ToolCallFormat(parse_hermes, write_hermes),
    "json_object": ToolCallFormat(parse_json_object, write_json_object),
    "kimi_k2": ToolCallFormat(parse_kimi_k2, write_kimi_k2),
    "llama3_json": ToolCallFormat(parse_llama3_json, write_llama3_json),
    "mistral": ToolCallFormat(parse_mistral, write_mistral),
    "pythonic": ToolCallFormat(parse_pythonic, write_pythonic),
    "qwen3_coder": ToolCallFormat(parse_qwen3_coder, write_qwen3_coder),
}

VLLM_NAMES = {
    "glm45": "glm",
    "glm47": "glm",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}
"""Where vLLM's name for a parser is another; recipes written for it keep working."""

# All of a row must be mentioned and the first such row counts: many formats say <tool_call>.
_MENTIONS = (
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ('{"name": function name, "parameters": ',)),
)


def parser_named(name: str) -> ToolCallParser:
    return _format_named(name).parse


def writer_named(name: str) -> ToolCallWriter:
    """Writes calls so that the parser of that name reads them back; ModelError where it cannot."""
    return partial(_write_checked, name, _format_named(name))


def detect_parser(chat_template: str) -> str | None:
    """The name of the parser for a model with this template; None if none of ours is meant."""
    for name, mentions in _MENTIONS:
        if all(mention in chat_template for mention in mentions):
            return name
    return None


def _format_named(name: str) -> ToolCallFormat:
    known = FORMATS.get(VLLM_NAMES.get(name, name))
    if known is None:
        choices = sorted([*FORMATS, *VLLM_NAMES])
        raise ConfigError(f"generator.tool_call_parser={name!r}; choose from {choices}")
    return known


def _write_checked(
    name: str, format: ToolCallFormat, calls: Sequence[ToolCall], /
) -> tuple[str, ...]:
    for call in calls:
        read = format.parse("".join(format.write([call])), [_spec_of(call)]).tool_calls
        if [(again.name, again.arguments) for again in read] != [(call.name, call.arguments)]:
            raise ModelError(
                f"{name} tool calls cannot say {call.name} with {dict(call.arguments)}: it would "
                "be read as something else; leave the call out or use a format with JSON arguments"
            )
    return tuple(format.write(calls)) if calls else ()


def _spec_of(call: ToolCall) -> ToolSpec:
    """A tool whose schema types the arguments as they are."""
    kinds = {
        key: {"type": "string" if isinstance(value, str) else "object"}
        for key, value in call.arguments.items()
    }
    return ToolSpec(name=call.name, description="", parameters={"properties": kinds})
