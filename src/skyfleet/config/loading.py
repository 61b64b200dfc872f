"""YAML + dotted overrides -> RunConfig; everything wrong with them is said at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from skyfleet.config import reading
from skyfleet.config.aliases import SPELLINGS, canonical_key, our_value
from skyfleet.config.keys import DERIVED, known_keys, known_sections
from skyfleet.config.references import resolve
from skyfleet.config.root import RunConfig
from skyfleet.config.rules import check
from skyfleet.config.unsupported_keys import refusal
from skyfleet.errors import ConfigError


def load_config(text: str = "", overrides: Sequence[str] = ()) -> RunConfig:
    """The run a text and its overrides describe, in either dialect.

    `load_config("trainer: {seed: 1}", ["+generator.max_turns=20"])`
    """
    problems: list[str] = []
    given = reading.read(text, overrides, problems, is_free=_is_free)
    values = _in_our_spelling(given, problems)
    derived = reading.nest({tuple(key.split(".")): value for key, value in DERIVED.items()})
    defaults = reading.overlay(RunConfig().model_dump(), derived)
    tree = _without_references(reading.overlay(defaults, reading.nest(values)), problems)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        misfits = dict.fromkeys(_key_of(problem["loc"]) for problem in error.errors())
        problems += [_misfit(key, tree) for key in misfits]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    check(config)
    return config


def load_config_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    if (Path(path) / "config.yaml").is_file():
        raise ConfigError(f"{path} is a folder; its configuration is {path}/config.yaml")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration: {error}") from None
    return load_config(text, overrides)


def _in_our_spelling(
    given: Mapping[reading.Path, Any], problems: list[str]
) -> dict[reading.Path, Any]:
    """The values we take; a problem for each of the others."""
    values: dict[reading.Path, Any] = {}
    spelled: dict[reading.Path, str] = {}
    for theirs, raw in given.items():
        path, name = canonical_key(theirs), ".".join(theirs)
        value = our_value(".".join(path), raw)
        twin = next((other for other in values if reading.overlap(other, path)), None)
        if twin and (twin != path or values[twin] != value):
            problems.append(
                f"{spelled[twin]}={values[twin]!r} and {name}={value!r} "
                "are two spellings of one key; keep one"
            )
        elif objection := _objection(path, value, name):
            problems.append(objection)
        elif not _means_default(path, value):
            values[path], spelled[path] = value, name
    return values


def _means_default(path: reading.Path, value: Any) -> bool:
    key, known = ".".join(path), known_keys()
    follows = key in known_sections() or key in DERIVED or (key in known and known[key].free)
    return value is None and follows


def _objection(path: reading.Path, value: Any, name: str) -> str | None:
    key, known = ".".join(path), known_keys()
    if _is_free(path) or key in known:
        return None
    if key in known_sections():
        if value is None or value == {} or (isinstance(value, str) and "${" in value):
            return None
        example = next(child for child in known if child.startswith(f"{key}."))
        return f"{name}={value!r}: {name} is a section; set a key in it, such as {example}"
    if reason := refusal(key):
        return f"{name} is not supported: {reason}"
    return f"{name} is unknown; {nearest(name)}"


def _is_free(path: reading.Path) -> bool:
    """Whether it is, or lies in, a mapping whose names are not ours."""
    known = known_keys()
    return any(known[above].free for above in _at_and_above(canonical_key(path)) if above in known)


def _at_and_above(path: reading.Path) -> list[str]:
    return [".".join(path[:end]) for end in range(1, len(path) + 1)]


def nearest(name: str) -> str:
    """A question or a pointer for someone who wrote a key that does not exist."""
    keys = [*known_keys(), *SPELLINGS]
    sections = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count("."))}
    every = [*keys, *sorted(sections)]
    # A right name in a wrong place says more than a similar one in the right place.
    displaced = [key for key in every if key.split(".")[-1] == name.split(".")[-1]]
    near = get_close_matches(name, displaced, n=1, cutoff=0) or get_close_matches(name, every, n=1)
    return f"did you mean {near[0]}?" if near else "`skyfleet config explain` lists the keys"


def _without_references(tree: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    values: dict[reading.Path, Any] = {}
    for path, value in reading.leaves(tree):
        try:
            values[path] = resolve(tree, value, (".".join(path),))
        except ConfigError as error:
            problems.append(str(error))
    return reading.nest(values)


def _key_of(location: tuple[int | str, ...]) -> str:
    """The key at or above the place where pydantic found fault."""
    names = [name for name in _at_and_above(tuple(map(str, location))) if name in known_keys()]
    return names[-1] if names else ".".join(map(str, location))


def _misfit(name: str, tree: Mapping[str, Any]) -> str:
    value: Any = tree
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    key = known_keys().get(name)
    if key is None:
        return f"{name}={value!r} does not fit here; see `skyfleet config explain {name}`"
    takes = key.type + (f", {key.bounds}" if key.bounds else "")
    follows = f"; unset, it is {DERIVED[name]}" if name in DERIVED else ""
    return f"{name}={value!r}: it takes {takes}{follows}"
