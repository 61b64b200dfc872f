"""Parsing: YAML text, `key=value` overrides and `${...}` references -> plain values by path."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from skyfleet.config.skyrl_compat import canonical_key
from skyfleet.errors import ConfigError
from skyfleet.secret_names import looks_secret

Path = tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-6 is a number and 2026-08-01 is a string."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag != "tag:yaml.org,2002:timestamp"]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, problems: list[str], *, file: str = "") -> dict[Path, Any]:
    """Every value of a YAML mapping by its path; what is wrong with the text goes to `problems`."""
    try:
        loader = _Loader(text)  # a SafeLoader
        loader.name = file or loader.name
        node = loader.get_single_node()
        tree = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        shown = _cut_secrets(" ".join(str(error).split()))
        problems.append(f"{file} is not YAML: {shown}" if file else f"not YAML: {shown}")
        return {}
    problems += (f"{file}: {found}" if file else found for found in _find_duplicates(node))
    if tree is None or isinstance(tree, dict):
        return dict(leaves(tree or {}))
    shown = _cut_secrets(repr(tree))
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    what = file or "this"
    problems.append(f"a configuration is a mapping of keys; {what} is {shown}")
    return {}


def _find_duplicates(node: yaml.Node | None) -> Iterator[str]:
    """One problem per key that a mapping has twice, of which YAML would silently use the last."""
    pending: list[tuple[Path, yaml.Node | None]] = [((), node)]
    seen: set[int] = set()
    while pending:
        path, node = pending.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += [(path, item) for item in node.value]
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                dotted = ".".join((*path, name))
                yield f"{dotted} is set on line {lines[name]} and again on line {line}; keep one"
            lines[name] = line
            pending.append(((*path, name), value))


def apply_overrides(
    given: dict[Path, Any],
    overrides: Sequence[str],
    problems: list[str],
    *,
    is_free: Callable[[Path], bool],
) -> None:
    """Add each `key=value`, also Hydra's `+key=value` and `++key=value`; a later one wins."""
    for override in overrides:
        key, equals, text = override.lstrip("+").partition("=")
        if not equals or not key:
            shown = _cut_secrets(override)
            problems.append(f"{shown!r} is not an override; write it as key=value")
            continue
        try:
            value = parse_value(text)
        except yaml.YAMLError:
            shown = _cut_secrets(text, name=key)
            problems.append(
                f'{key}={shown!r} is not a YAML value; put quotes inside, as in {key}=\'["a", "b"]\''
            )
            continue
        set_value(given, key.strip(), value, problems, is_free=is_free)


def set_value(
    given: dict[Path, Any],
    key: str,
    value: Any,
    problems: list[str],
    *,
    is_free: Callable[[Path], bool],
) -> None:
    """Set one key. A mapping adds to a section; it replaces a key that `is_free`, whose names are the
    user's own."""
    path = tuple(key.split("."))
    if above := _find_list_above(given, path):
        items = given[tuple(above.split("."))]
        problems.append(
            f"{key}={value}: {above}={items} is a list, to which no name can be added; "
            f"set {above}={{NAME: [...], ...}} whole"
        )
        return
    put = dict(leaves(value, path))
    prefixes = {leaf[:end] for leaf in put for end in range(len(path), len(leaf) + 1)}
    replaced = [canonical_key(prefix) for prefix in prefixes if is_free(prefix)]
    for other in list(given):
        canonical = canonical_key(other)
        if any(overlaps(other, leaf) for leaf in put) or any(
            overlaps(canonical, new) for new in replaced
        ):
            del given[other]
    given.update(put)


def _cut_secrets(text: str, *, name: str = "") -> str:
    """Text that is not YAML, for an error: nobody knows where a secret in it would end."""
    if looks_secret(name.rsplit(".", 1)[-1]):
        return "..."
    for found in re.finditer(r"([\w.-]+)[\"']?\s*[:=]", text):
        if looks_secret(found[1].rsplit(".", 1)[-1]):
            return f"{text[: found.end()]}..."
    return text


def parse_value(text: str) -> Any:
    """One value by YAML's rules, Hydra's `{key:value}` without a space, and `[world:x?count=9]`."""
    try:
        return _split_pairs(yaml.load(text, _Loader))  # a SafeLoader
    except yaml.YAMLError:
        # In a list YAML takes the question mark of an address for a key.
        if match := re.fullmatch(r"\[([^\[\]{}'\"]*\?[^\[\]{}'\"]*)\]", text.strip()):
            return [item.strip() for item in match[1].split(",")]
        raise


def nest(values: Mapping[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        below = tree
        for part in path[:-1]:
            below = below.setdefault(part, {})
        below[path[-1]] = value
    return tree


def overlay(base: Any, top: Any) -> Any:
    """Merge mappings key by key; replace anything else."""
    if not isinstance(base, dict) or not isinstance(top, dict):
        return top
    return {**base, **{name: overlay(base.get(name), value) for name, value in top.items()}}


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values below a mapping; an empty mapping is a value."""
    if isinstance(value, Mapping) and (value or not path):
        for name, item in value.items():
            yield from leaves(item, (*path, str(name)))
    else:
        yield path, value


def overlaps(one: Path, other: Path) -> bool:
    """Whether one path equals the other or lies below it."""
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _find_list_above(given: Mapping[Path, Any], path: Path) -> str:
    """The key of a list that setting `path` would silently remove."""
    canonical = canonical_key(path)
    for other, value in given.items():
        theirs = canonical_key(other)
        if isinstance(value, list) and value and canonical[: len(theirs)] == theirs != canonical:
            return ".".join(other)
    return ""


def _split_pairs(value: Any) -> Any:
    """Read `{key:value}`, in which YAML sees one name without a value."""
    if isinstance(value, list):
        return [_split_pairs(item) for item in value]
    if isinstance(value, dict):
        return dict(_split_pair(name, item) for name, item in value.items())
    return value


def _split_pair(name: Any, item: Any) -> tuple[Any, Any]:
    if item is None and isinstance(name, str) and ":" in name:
        name, _, text = name.partition(":")
        return name, parse_value(text)
    return name, _split_pairs(item)


# A reference may contain another one, as the default of an environment variable.
_REFERENCE = re.compile(r"\$\{((?:[^{}]|\{[^{}]*\})*)\}")


def resolve(tree: Mapping[str, Any], value: Any, trail: tuple[str, ...]) -> Any:
    """The value with `${a.b}` and `${oc.env:NAME,default}` replaced.

    A reference that is the whole value keeps its type. `trail` holds the keys that led here; the last
    one holds the value.
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
        return _read_environment(tree, name.removeprefix("oc.env:"), trail)
    path = canonical_key(tuple(name.split(".")))
    key = ".".join(path)
    if key in trail:
        raise ConfigError(_describe_cycle(trail[trail.index(key) :]))
    return resolve(tree, _look_up(tree, path, name, trail[-1]), (*trail, key))


def _describe_cycle(keys: tuple[str, ...]) -> str:
    # Starts at the same key wherever the cycle was entered, so that one cycle is one sentence.
    start = keys.index(min(keys))
    cycle = " -> ".join((*keys[start:], *keys[:start], keys[start]))
    return f"{cycle} is a cycle of references; give one of them a value"


def _look_up(tree: Mapping[str, Any], path: Path, name: str, holder: str) -> Any:
    found: Any = tree
    for part in path:
        if not isinstance(found, Mapping) or part not in found:
            raise ConfigError(
                f"{holder} refers to ${{{name}}}, which is not a key; write a dotted key, "
                f"or ${{oc.env:{name}}} for an environment variable"
            )
        found = found[part]
    return found


def _read_environment(tree: Mapping[str, Any], text: str, trail: tuple[str, ...]) -> Any:
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
    except yaml.YAMLError:
        return default
