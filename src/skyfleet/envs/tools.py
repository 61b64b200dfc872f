"""Tools from plain typed functions: JSON schema from the signature, argument validation, tool errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from skyfleet.chat.message import ToolSpec

ToolFunction = Callable[..., object]
"""Takes the environment's state first, then the parameters that the agent sees."""

_SHOWN_CHARACTERS = 40
"""How much of an invalid value an error repeats."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class ToolError(Exception):
    """The agent's mistake and how to correct it. A tool raises it; the agent gets the text.

    >>> import skyfleet as sf
    >>> def look_up(word: str) -> str:
    ...     "Look up a word."
    ...     raise sf.ToolError(f"no entry for {word!r}; use the singular")
    >>> env = sf.ToolEnv(tools=[look_up], reward=lambda answer: 0.0)
    >>> solution = [{"name": "look_up", "arguments": {"word": "herons"}}]
    >>> task = {"prompt": "What are herons?", "solution": solution}
    >>> sf.rollout("oracle", env, task).messages[2].text
    "Error: no entry for 'herons'; use the singular"
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    spec: ToolSpec
    function: ToolFunction
    arguments: type[BaseModel]
    writes: bool
    """Whether it may change the database; a tool that does not write runs read-only."""

    @classmethod
    def of(cls, function: ToolFunction, *, writes: bool = False) -> Tool:
        """Build the tool from the function's name, signature and docstring."""
        hints = get_type_hints(function, include_extras=True)
        _, *parameters = inspect.signature(function).parameters.values()
        fields: dict[str, Any] = {
            p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in parameters
        }
        model = create_model(function.__name__, __config__=ConfigDict(strict=True), **fields)
        spec = ToolSpec(
            name=function.__name__,
            description=inspect.getdoc(function) or "",
            parameters=_build_schema(model),
        )
        return cls(spec=spec, function=function, arguments=model, writes=writes)

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate the arguments; ToolError names the first invalid one."""
        for name, value in arguments.items():
            if name not in self.spec.parameters["properties"]:
                raise ToolError(f"{self.spec.name} has no {shown(name)}; {self._takes}")
            # SQLite stores 64 bits and UTF-8; a number of 5,000 digits cannot even be printed.
            if isinstance(value, int) and value.bit_length() > 63:
                raise ToolError(f"{name} is too large a number; use one from a listing")
            if isinstance(value, str) and _LONE_SURROGATE.search(value):
                raise ToolError(f"{name} is {shown(value)}; write it without half characters")
        try:
            return vars(self.arguments.model_validate(dict(arguments)))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            wrong, right = first["loc"][0], first["msg"][0].lower() + first["msg"][1:]
            if first["type"] == "missing":
                raise ToolError(f"{self.spec.name} needs {wrong}; {self._takes}") from error
            raise ToolError(f"{wrong} is {shown(first['input'])}; {right}") from error

    @property
    def _takes(self) -> str:
        return f"it takes {', '.join(self.spec.parameters['properties']) or 'nothing'}"


def check_known(kind: str, name: str, known: Sequence[str]) -> None:
    """Raise a ToolError that lists the known names unless `name` is one of them."""
    if name not in known:
        raise ToolError(f"no {kind} {shown(name)}; choose from {', '.join(known)}")


def shown(value: object) -> str:
    """Format a value from the agent so that an error can repeat it safely and briefly."""
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _build_schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    properties = {name: _simplify(prop) for name, prop in schema.get("properties", {}).items()}
    return {"type": "object", "properties": properties, "required": schema.get("required", [])}


def _simplify(prop: Mapping[str, Any]) -> dict[str, Any]:
    """Drop titles, defaults and null options: `required` alone says what is optional."""
    plain = {key: value for key, value in prop.items() if key not in ("title", "default")}
    for option in plain.pop("anyOf", ()):
        if option != {"type": "null"}:
            plain |= option
    if "const" in plain:
        plain["enum"] = [plain.pop("const")]
    return plain
