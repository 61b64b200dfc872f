"""HarmonyRenderer: the chat format of gpt-oss, with channels for reasoning, calls and answers.

The template drops reasoning once an answer follows it and ends old answers with `<|end|>`; this
renderer keeps both the reasoning and the `<|return|>` as they were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyfleet.chat.call_ids import parse_tool_name, resolve_call_ids
from skyfleet.chat.message import Message, ToolSpec, extract_text
from skyfleet.chat.renderer import BuiltinRenderer, find_between
from skyfleet.chat.template import Template
from skyfleet.chat.template_checks import QUESTION
from skyfleet.chat.tokenizer import SpecialToken, Tokenizer
from skyfleet.chat.tool_calls.harmony import (
    CALL,
    CHANNEL,
    END,
    MESSAGE,
    RETURN,
    START,
    parse_harmony,
    write_harmony,
)
from skyfleet.errors import ModelError

Schema = Mapping[str, Any]

_SIMPLE = {"number": "number", "integer": "number", "boolean": "boolean"}
_LONGEST_ITEM = 50
"""In characters; an array whose item type is longer has the type any[]."""
_INDENT = "\n" + " " * 16
"""The whitespace that the template leaves before the type of an object field."""


def render_harmony_tools(tools: Sequence[ToolSpec]) -> str:
    functions = "".join(map(_function, tools))
    return f"## functions\n\nnamespace functions {{\n\n{functions}}} // namespace functions"


def _function(tool: ToolSpec) -> str:
    properties: Mapping[str, Schema] = tool.parameters.get("properties") or {}
    head = f"// {tool.description}\ntype {tool.name} = "
    if not properties:
        return f"{head}() => any;\n\n"
    required = tool.parameters.get("required") or ()
    parameters = "".join(
        _parameter(name, schema, name in required) for name, schema in properties.items()
    )
    return f"{head}(_: {{\n{parameters}}}) => any;\n\n"


def _parameter(name: str, schema: Schema, is_required: bool) -> str:
    comment = f"// {schema['description']}\n" if schema.get("description") else ""
    return f"{comment}{name}{'' if is_required else '?'}: {_type(schema)}{_default(schema)},\n"


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return ""
    default = schema["default"]
    if schema.get("oneOf"):
        return f"// default: {default}"
    value = default if schema.get("enum") else json.dumps(default, ensure_ascii=False)
    return f", // default: {value}"


def _type(schema: Schema) -> str:
    kind, null = schema.get("type"), " | null" if schema.get("nullable") else ""
    if kind == "array":
        return f"{_item(schema.get('items') or {})}[]{null}"
    if isinstance(kind, list) and kind:
        return " | ".join(kind)
    if schema.get("oneOf"):
        return " | \n".join(map(_variant, schema["oneOf"]))
    if kind == "string":
        enum = schema.get("enum")
        return " | ".join(f'"{choice}"' for choice in enum) if enum else f"string{null}"
    if kind == "object":
        return _object(schema)
    return _SIMPLE.get(str(kind), "any")


def _item(schema: Schema) -> str:
    # The template omits the enum of a string inside an array.
    item = "string" if schema.get("type") == "string" else _type(schema)
    return "any" if len(item) > _LONGEST_ITEM or item == "object | object" else item


def _variant(schema: Schema) -> str:
    description = schema.get("description")
    return _type(schema) + (f"// {description}" if description else "")


def _object(schema: Schema) -> str:
    properties: Mapping[str, Schema] = schema.get("properties") or {}
    required = schema.get("required") or ()
    fields = (
        f"{name}{'' if name in required else '?'}: {_INDENT}{_type(inner)}"
        for name, inner in properties.items()
    )
    return f"{{\n{', '.join(fields)}}}" if properties else "object"


END_OF_TEXT = SpecialToken("<|endoftext|>")

_CALL_CHANNEL_NOTE = "\nCalls to these tools must go to the commentary channel: 'functions'."


class HarmonyRenderer(BuiltinRenderer):
    def __init__(self, tokenizer: Tokenizer, *, identity: str, close_turns: bool = True) -> None:
        """`identity` is the system message without tools: model identity, date, reasoning effort."""
        super().__init__(
            tokenizer,
            parse=parse_harmony,
            required_tokens=(START, CHANNEL, MESSAGE, END, CALL, RETURN),
            stop_tokens=(RETURN, CALL, END_OF_TEXT),
            turn_ends=(END, CALL, RETURN),
            close_turns=close_turns,
        )
        self._identity = identity

    @classmethod
    def from_template(cls, template: Template, *, close_turns: bool) -> HarmonyRenderer:
        prompt = template.render([QUESTION])
        identity = find_between("<|start|>system<|message|>", "<|end|>", prompt)
        return cls(template.tokenizer, identity=identity or "", close_turns=close_turns)

    def _render_conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Iterator[str]:
        yield from (
            START,
            "system",
            MESSAGE,
            self._identity,
            _CALL_CHANNEL_NOTE if tools else "",
            END,
        )
        instructions, rest = "", messages
        if messages and messages[0].role == "system":
            instructions, rest = extract_text(messages[0]), messages[1:]
        if instructions or tools:
            yield from (START, "developer", MESSAGE)
            yield f"# Instructions\n\n{instructions}\n\n" if instructions else ""
            yield f"# Tools\n\n{render_harmony_tools(tools)}" if tools else ""
            yield END
        yield from self._render_messages(rest)

    def _render_messages(self, messages: Sequence[Message]) -> Iterator[str]:
        for message, answered in resolve_call_ids(messages):
            if message.role == "assistant":
                yield from (*self._generation_prompt(), *_render_assistant(message, end=END))
            elif message.role == "tool":
                yield from _render_result(message, parse_tool_name(answered))
            else:
                yield from (START, message.role, MESSAGE, extract_text(message), END)

    def _generation_prompt(self) -> tuple[str, ...]:
        return (START, "assistant")

    def _render_turn(self, message: Message) -> Iterator[str]:
        return _render_assistant(message, end=RETURN)


def _render_result(message: Message, name: str) -> tuple[str, ...]:
    if not name:
        raise ModelError(
            f"a tool message has tool_call_id={message.tool_call_id!r}, but the gpt-oss format names "
            "the function that returned; set tool_call_id to the id of the call"
        )
    quoted = json.dumps(extract_text(message), ensure_ascii=False)
    return (START, f"functions.{name} to=assistant", CHANNEL, "commentary", MESSAGE, quoted, END)


def _render_assistant(message: Message, *, end: SpecialToken) -> Iterator[str]:
    """One message per channel; all but the first repeat `<|start|>assistant`."""
    parts = list(_parts(message, end))
    yield from parts[0]
    for part in parts[1:]:
        yield from (START, "assistant", *part)


def _parts(message: Message, end: SpecialToken) -> Iterator[tuple[str, ...]]:
    if message.reasoning is not None:
        yield (CHANNEL, "analysis", MESSAGE, message.reasoning, END)
    text = "\n".join(filter(None, (extract_text(message), *message.malformed_calls)))
    if text and message.tool_calls:
        yield (CHANNEL, "commentary", MESSAGE, text, END)
    if message.tool_calls:
        yield tuple(write_harmony(message.tool_calls))
    else:
        yield (CHANNEL, "final", MESSAGE, text, end)
