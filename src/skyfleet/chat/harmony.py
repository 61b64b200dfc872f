"""HarmonyRenderer: the channels of gpt-oss, thought apart from calls apart from answers.

The template drops a thought once an answer has followed it and ends old answers with `<|end|>`;
here both the thought and the `<|return|>` stay as they were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyfleet.chat.call_ids import called_name, with_answered_ids
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.pieces import Mark
from skyfleet.chat.renderer import HandWrittenRenderer
from skyfleet.chat.text_only import text_only
from skyfleet.chat.tokenizer import Tokenizer
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
"""Characters; the type of a list whose items take more is any[]."""
_INDENT = "\n" + " " * 16
"""What the template lets stand before the type of an object's field: the model knows it so."""


def harmony_tools(tools: Sequence[ToolSpec]) -> str:
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
    written = default if schema.get("enum") else json.dumps(default, ensure_ascii=False)
    return f", // default: {written}"


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
    # The choices of a text are left out, inside a list.
    written = "string" if schema.get("type") == "string" else _type(schema)
    return "any" if len(written) > _LONGEST_ITEM or written == "object | object" else written


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


END_OF_TEXT = Mark("<|endoftext|>")

_WHERE_CALLS_GO = "\nCalls to these tools must go to the commentary channel: 'functions'."


class HarmonyRenderer(HandWrittenRenderer):
    def __init__(self, tokenizer: Tokenizer, *, identity: str, close_turns: bool = True) -> None:
        """`identity` is the system message without tools: who speaks, the date, the effort."""
        super().__init__(
            tokenizer,
            parse=parse_harmony,
            marks=(START, CHANNEL, MESSAGE, END, CALL, RETURN),
            stops=(RETURN, CALL, END_OF_TEXT),
            closers=(END, CALL, RETURN),
            close_turns=close_turns,
        )
        self._identity = identity

    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterator[str]:
        yield from (START, "system", MESSAGE, self._identity, _WHERE_CALLS_GO if tools else "", END)
        told, rest = "", messages
        if messages and messages[0].role == "system":
            told, rest = text_only(messages[0]), messages[1:]
        if told or tools:
            yield from (START, "developer", MESSAGE)
            yield f"# Instructions\n\n{told}\n\n" if told else ""
            yield f"# Tools\n\n{harmony_tools(tools)}" if tools else ""
            yield END
        yield from self._following(rest)

    def _following(self, messages: Sequence[Message]) -> Iterator[str]:
        for message, answered in with_answered_ids(messages):
            if message.role == "assistant":
                yield from (*self._prompt(), *_said(message, end=END))
            elif message.role == "tool":
                yield from _tool_result(message, called_name(answered))
            else:
                yield from (START, message.role, MESSAGE, text_only(message), END)

    def _prompt(self) -> tuple[str, ...]:
        return (START, "assistant")

    def _speech(self, message: Message) -> Iterator[str]:
        return _said(message, end=RETURN)


def _tool_result(message: Message, name: str) -> tuple[str, ...]:
    if not name:
        raise ModelError(
            f"a tool message has tool_call_id={message.tool_call_id!r}, and gpt-oss is told which "
            "function answers; set it to the id of the call"
        )
    quoted = json.dumps(text_only(message), ensure_ascii=False)
    return (START, f"functions.{name} to=assistant", CHANNEL, "commentary", MESSAGE, quoted, END)


def _said(message: Message, *, end: Mark) -> Iterator[str]:
    """One message a channel; all but the first name their speaker again."""
    parts = list(_parts(message, end))
    yield from parts[0]
    for part in parts[1:]:
        yield from (START, "assistant", *part)


def _parts(message: Message, end: Mark) -> Iterator[tuple[str, ...]]:
    if message.reasoning is not None:
        yield (CHANNEL, "analysis", MESSAGE, message.reasoning, END)
    text = "\n".join(filter(None, (text_only(message), *message.malformed_calls)))
    if text and message.tool_calls:
        yield (CHANNEL, "commentary", MESSAGE, text, END)
    if message.tool_calls:
        yield tuple(write_harmony(message.tool_calls))
    else:
        yield (CHANNEL, "final", MESSAGE, text, end)
