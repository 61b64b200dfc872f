"""References: `${a.b}` and `${oc.env:NAME,default}` -> the values they stand for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from yaml import YAMLError

from skyfleet.config.aliases import canonical_key
from skyfleet.config.reading import parse_value
from skyfleet.errors import ConfigError

# One reference may stand inside another, as the default of an environment variable.
_REFERENCE = re.compile(r"\$\{((?:[^{}]|\{[^{}]*\})*)\}")


def resolve(tree: Mapping[str, Any], value: Any, trail: tuple[str, ...]) -> Any:
    """The value with its references followed; one that is a whole value keeps its type.

    The trail is the keys that led here; its last one holds the value.
    """
    if isinstance(value, dict):
        return {name: resolve(tree, item, trail) for name, item in value.items()}
    if isinstance(value, list):
        return [resolve(tree, item, trail) for item in value]
    if not isinstance(value, str):
        return value
    if whole := _REFERENCE.fullmatch(value):
        return _follow(tree, whole[1], trail)
    return _REFERENCE.sub(lambda found: str(_follow(tree, found[1], trail)), value)


def _follow(tree: Mapping[str, Any], name: str, trail: tuple[str, ...]) -> Any:
    if name.startswith("oc.env:"):
        return _from_environment(tree, name.removeprefix("oc.env:"), trail)
    path = canonical_key(tuple(name.split(".")))
    key = ".".join(path)
    if key in trail:
        raise ConfigError(_circle(trail[trail.index(key) :]))
    return resolve(tree, _look_up(tree, path, name, trail[-1]), (*trail, key))


def _circle(keys: tuple[str, ...]) -> str:
    # Told from the same key wherever it was entered, so that one circle is one sentence.
    start = keys.index(min(keys))
    around = " -> ".join((*keys[start:], *keys[:start], keys[start]))
    return f"{around} is a circle of references; give one of them a value"


def _look_up(tree: Mapping[str, Any], path: tuple[str, ...], name: str, holder: str) -> Any:
    found: Any = tree
    for part in path:
        if not isinstance(found, Mapping) or part not in found:
            raise ConfigError(
                f"{holder} refers to ${{{name}}}, which is no key; write a dotted key, "
                f"or ${{oc.env:{name}}} for an environment variable"
            )
        found = found[part]
    return found


def _from_environment(tree: Mapping[str, Any], text: str, trail: tuple[str, ...]) -> Any:
    name, comma, default = (part.strip() for part in text.partition(","))
    if name in os.environ:
        return os.environ[name]
    if not comma:
        raise ConfigError(
            f"{trail[-1]} refers to ${{oc.env:{name}}}, which is not set; "
            f"set it or write ${{oc.env:{name},default}}"
        )
    if "${" in default:
        return resolve(tree, default, trail)
    try:
        return parse_value(default)
    except YAMLError:
        return default
