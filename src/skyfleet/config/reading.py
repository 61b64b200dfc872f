"""Reading: YAML text and `key=value` overrides -> plain values by path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from skyfleet.config.aliases import canonical_key

Path = tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-6 is a number and 2026-08-01 is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag != "tag:yaml.org,2002:timestamp"]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read(
    text: str, overrides: Sequence[str], problems: list[str], *, is_free: Callable[[Path], bool]
) -> dict[Path, Any]:
    """Every value by the path it was given under; a later override wins.

    An override's mapping adds to a section and replaces what `is_free`, whose names are the user's.
    """
    given = dict(leaves(_mapping(text, problems)))
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        if not equals or not key:
            problems.append(f"{override!r} is not an override; write it as key=value")
            continue
        try:
            path = tuple(key.strip().split("."))
            if above := _list_above(given, path):
                problems.append(
                    f"{key}={value}: {above}={given[tuple(above.split('.'))]} is a list, to which "
                    f"no name can be added; set {above}={{NAME: [...], ...}} whole"
                )
                continue
            _put(given, path, parse_value(value), is_free)
        except yaml.YAMLError:
            problems.append(
                f'{key}={value!r} is not a YAML value; put quotes inside, as in {key}=\'["a", "b"]\''
            )
    return given


def parse_value(text: str) -> Any:
    """One value by YAML's rules, Hydra's `{key:value}` without a space, and `[world:x?count=9]`."""
    try:
        return _spaced(yaml.load(text, _Loader))  # a SafeLoader
    except yaml.YAMLError:
        # In a list YAML takes the question mark of an address for a key.
        if match := re.fullmatch(r"\[([^\[\]{}'\"]*\?[^\[\]{}'\"]*)\]", text.strip()):
            return [item.strip() for item in match[1].split(",")]
        raise


def nest(given: Mapping[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in given.items():
        below = tree
        for part in path[:-1]:
            below = below.setdefault(part, {})
        below[path[-1]] = value
    return tree


def overlay(base: Any, top: Any) -> Any:
    """Mappings merge key by key; anything else is replaced."""
    if not isinstance(base, dict) or not isinstance(top, dict):
        return top
    return {**base, **{name: overlay(base.get(name), value) for name, value in top.items()}}


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values below a mapping; an empty mapping is a value."""
    if isinstance(value, dict) and (value or not path):
        for name, item in value.items():
            yield from leaves(item, (*path, str(name)))
    else:
        yield path, value


def overlap(one: Path, other: Path) -> bool:
    """Whether one is the other or lies below it."""
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _mapping(text: str, problems: list[str]) -> dict[Any, Any]:
    try:
        tree = yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        problems.append(f"not YAML: {' '.join(str(error).split())}")
        return {}
    if tree is None or isinstance(tree, dict):
        return tree or {}
    shown = repr(tree)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    problems.append(f"a configuration is a mapping of keys; this is {shown}")
    return {}


def _put(given: dict[Path, Any], path: Path, value: Any, is_free: Callable[[Path], bool]) -> None:
    """Set a value, which replaces what was above or below."""
    put = dict(leaves(value, path))
    prefixes = {leaf[:end] for leaf in put for end in range(len(path), len(leaf) + 1)}
    whole = [canonical_key(prefix) for prefix in prefixes if is_free(prefix)]
    for other in list(given):
        ours = canonical_key(other)
        if any(overlap(other, leaf) for leaf in put) or any(overlap(ours, new) for new in whole):
            del given[other]
    given.update(put)


def _list_above(given: Mapping[Path, Any], path: Path) -> str:
    """The key of a list that setting `path` would remove without a word."""
    ours = canonical_key(path)
    for other, value in given.items():
        theirs = canonical_key(other)
        if isinstance(value, list) and value and ours[: len(theirs)] == theirs != ours:
            return ".".join(other)
    return ""


def _spaced(value: Any) -> Any:
    if isinstance(value, list):
        return [_spaced(item) for item in value]
    if isinstance(value, dict):
        return dict(_pair(name, item) for name, item in value.items())
    return value


def _pair(name: Any, item: Any) -> tuple[Any, Any]:
    if item is None and isinstance(name, str) and ":" in name:
        name, _, text = name.partition(":")
        return name, parse_value(text)
    return name, _spaced(item)
