"""BFCL's test cases as rows, with a reference solution where one call per turn can give it."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.bfcl.package import Entry, list_categories, load_bfcl, load_category
from skyfleet.envs.tool_turns import RESPOND_NAME
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import NULL_SUCCESS, RecordedCall, Task

ENV_CLASS = "bfcl"


def bfcl_tasks_from_source(source: str) -> list[Task]:
    """Read `bfcl:simple_python?count=100`; `bfcl:` is every category."""
    category, _, query = source.removeprefix("bfcl:").partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    count = options.pop("count", None)
    if options or (count is not None and not (count.isdecimal() and int(count))):
        name, value = next(iter(options.items()), ("count", count))
        raise ConfigError(
            f"{source}: {name}={value!r} is unknown; write bfcl:simple_python?count=100"
        )
    categories = [category] if category else list_categories()
    return [
        task
        for one in categories
        for task in bfcl_tasks(one, None if count is None else int(count))
    ]


def bfcl_tasks(category: str, count: int | None = None) -> list[Task]:
    """Return the test cases of a category in its order, or the first `count` of them."""
    entries = list(load_category(category).items())[:count]
    return [_make_task(category, key, entry) for key, entry in entries]


def _make_task(category: str, key: str, entry: Entry) -> Task:
    first = entry.shown["question"][0]
    return Task(
        key=f"{ENV_CLASS}-{key}",
        env_key=f"{ENV_CLASS}-{category}",
        env_class=ENV_CLASS,
        prompt=first[-1]["content"] or " ",
        solution=tuple(list_reference_calls(category, entry)),
        metadata={
            "category": category,
            "test_id": key,
            NULL_SUCCESS: category.endswith("irrelevance"),
        },
    )


def make_tool_specs(functions: Sequence[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """Functions with JSON's types, and without dots in their names, as for OpenAI's API."""
    return tuple(
        ToolSpec(
            name=name_tool(function["name"]),
            description=function["description"],
            parameters=_to_json_schema(function["parameters"]),
        )
        for function in functions
    )


def name_tool(name: str) -> str:
    return name.replace(".", "_")


def _to_json_schema(schema: Any) -> dict[str, Any]:
    types = load_bfcl().json_types
    converted = copy.deepcopy(dict(schema))
    if "type" in converted:
        converted["type"] = types.get(converted["type"], "string")
    if isinstance(properties := converted.get("properties"), dict):
        converted["properties"] = {
            name: _to_json_schema(one) for name, one in properties.items() if isinstance(one, dict)
        }
    if isinstance(items := converted.get("items"), dict):
        converted["items"] = _to_json_schema(items)
    return converted


def list_reference_calls(category: str, entry: Entry) -> list[RecordedCall]:
    """The calls of the reference; none where a message needs several or the answer is no call."""
    if category.startswith("multi_turn"):
        return _list_multi_turn_calls(entry)
    calls = choose_answer(entry)
    return calls if len(calls) == 1 else []


def choose_answer(entry: Entry) -> list[RecordedCall]:
    """Calls with the first value that the answer accepts for each argument."""
    is_java = entry.shown["id"].startswith("simple_java_")
    calls = []
    for call in entry.answer or ():
        for name, accepted in call.items():
            function = _find_function(entry, name)
            arguments = _choose_values(accepted)
            # An empty text may also be the only accepted value of an argument that is required.
            arguments |= {n: "" for n in function["required"] if n not in arguments}
            if entry.shown["id"].startswith("simple_java"):
                arguments = {
                    n: _to_literal(value, function["properties"][n]["type"], is_java=is_java)
                    for n, value in arguments.items()
                }
            calls.append(RecordedCall(name=name_tool(name), arguments=arguments))
    return calls


def _find_function(entry: Entry, name: str) -> Mapping[str, Any]:
    """The parameters of a function."""
    found = (one["parameters"] for one in entry.checked["function"] if one["name"] == name)
    return next(found, {"properties": {}, "required": []})


_SUFFIXES = {"long": "L", "float": "f"}


def _to_literal(value: Any, type_name: str, *, is_java: bool) -> str:
    """A value as Java's or JavaScript's source text, which models write in these categories."""
    if isinstance(value, str):
        return value
    if is_java and type_name in ("ArrayList", "Array"):
        items = ", ".join(json.dumps(one) for one in value)
        return (
            f"new ArrayList<>(Arrays.asList({items}))"
            if type_name == "ArrayList"
            else f"new Object[]{{{items}}}"
        )
    return json.dumps(value) + (_SUFFIXES.get(type_name, "") if is_java else "")


def _choose_values(accepted: Mapping[str, Any]) -> dict[str, Any]:
    """An empty text means that the argument may be left out."""
    chosen = {
        name: next((one for one in values if one != ""), None)
        if isinstance(values, list)
        else values
        for name, values in accepted.items()
    }
    return {name: _choose_nested(value) for name, value in chosen.items() if value is not None}


def _choose_nested(value: Any) -> Any:
    """In an object, and in a list of them, the accepted values are lists once more."""
    if isinstance(value, dict):
        return _choose_values(value)
    return [_choose_nested(one) for one in value] if isinstance(value, list) else value


def _list_multi_turn_calls(entry: Entry) -> list[RecordedCall]:
    parameters = {
        function["name"]: list(function["parameters"]["properties"])
        for function in (
            *entry.shown["function"],
            *(one for more in entry.shown.get("missed_function", {}).values() for one in more),
        )
    }
    calls = []
    for turn in entry.answer or ():
        calls += [_read_call(text, parameters) for text in turn]
        calls.append(RecordedCall(name=RESPOND_NAME, arguments={"content": "Done."}))
    return calls


def _read_call(text: str, parameters: Mapping[str, Sequence[str]]) -> RecordedCall:
    """Read `grep(file_name='report', pattern='budget')`; positional arguments get their names."""
    call = ast.parse(re.sub(r"^\s+", "", text), mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    name = call.func.id
    values = {n: ast.literal_eval(v) for n, v in zip(parameters[name], call.args, strict=False)}
    values |= {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg}
    return RecordedCall(name=name, arguments=values)
