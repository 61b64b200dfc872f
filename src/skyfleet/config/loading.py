"""Loading: YAML, `key=value` overrides or Python values -> RunConfig, or one error with every problem."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from skyfleet.config import parsing
from skyfleet.config.keys import (
    DERIVED,
    derive_defaults,
    format_accepted,
    is_free_key,
    known_keys,
    known_sections,
    suggest_key,
    value_at,
)
from skyfleet.config.redaction import find_redacted, find_variables, remember_config_secrets
from skyfleet.config.root import RunConfig
from skyfleet.config.skyrl_compat import (
    UNSUPPORTED_VALUES,
    VALUES_WITHOUT_EFFECT,
    canonical_key,
    canonical_value,
    find_unsupported_key,
    is_old_run_config,
)
from skyfleet.config.validation import find_conflicts, find_unsupported_values
from skyfleet.errors import ConfigError
from skyfleet.secret_names import looks_secret

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def load_config(text: str = "", overrides: Sequence[str] = (), *, file: str = "") -> RunConfig:
    """Load YAML text and overrides, in either of SkyRL's spellings.

    `load_config("trainer: {seed: 1}", ["+generator.max_turns=20"])`. Errors name the `file`.
    """
    problems: list[str] = []
    given = parsing.parse_yaml(text, problems, file=file)
    parsing.apply_overrides(given, overrides, problems, is_free=is_free_key)
    names = [override.lstrip("+").partition("=")[0].strip() for override in overrides]
    return _build_config(given, problems).with_override_keys(map(_canonical_name, names))


def load_config_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a YAML file, or a preset by its name, such as `tiny`."""
    return load_config(_read_text(path), overrides, file=str(path))


def load_recorded_config(path: str | Path) -> RunConfig:
    """Load the config.yaml of a run to read it: secrets may be redacted and variables unset."""
    text = _read_text(path)
    try:
        return parse_recorded_config(text)
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be read as a configuration: {error}") from None


def parse_recorded_config(text: str) -> RunConfig:
    """As `load_recorded_config`, from the text of the file."""
    problems: list[str] = []
    given = parsing.parse_yaml(text, problems)
    return _build_config(given, problems, is_record=True)


def config_from_python(
    base: RunConfig | str | Path | Mapping[str, Any] | None, overrides: Mapping[str, object]
) -> RunConfig:
    """Load a preset, a YAML file or a dict (nested or dotted), and set dotted keys to Python values.

    A RunConfig without overrides is returned as it is.

    `config_from_python("tiny", {"trainer.seed": 1, "data.train_data": [Path("tasks.jsonl")]})`
    """
    problems: list[str] = []
    given: dict[parsing.Path, Any] = {}
    if isinstance(base, RunConfig):
        return _change_config(base, overrides) if overrides else base
    if isinstance(base, (str, Path)):
        given = parsing.parse_yaml(_read_text(base), problems, file=str(base))
        base = None
    for values in (base or {}, overrides):
        for key, value in values.items():
            parsing.set_value(given, key, _to_plain(value), problems, is_free=is_free_key)
    return _build_config(given, problems).with_override_keys(map(_canonical_name, overrides))


def _canonical_name(key: str) -> str:
    return ".".join(canonical_key(tuple(key.split("."))))


def _change_config(base: RunConfig, overrides: Mapping[str, object]) -> RunConfig:
    problems: list[str] = []
    given: dict[parsing.Path, Any] = {}
    for key, value in {**base.model_dump(), **overrides}.items():
        parsing.set_value(given, key, _to_plain(value), problems, is_free=is_free_key)
    # As a record, because a base that was read from a run may lack its secrets.
    config = _build_config(given, problems, is_record=True)
    config = config.with_variables({**base.variables, **config.variables})
    config = config.with_override_keys({*base.override_keys, *map(_canonical_name, overrides)})
    return config.with_ignored_keys({**base.ignored_keys, **config.ignored_keys})


def preset_names() -> list[str]:
    """The names that `load_config_file` accepts beside paths."""
    folder = _find_presets()
    if folder is None:
        return []
    return sorted(
        file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")
    )


def _find_presets() -> Traversable | None:
    from importlib.resources import files  # only a preset needs it, and it takes 15 ms

    try:
        return files("skyfleet.presets")
    except ModuleNotFoundError:
        return None


def _read_text(path: str | Path) -> str:
    if (Path(path) / "config.yaml").is_file():
        raise ConfigError(f"{path} is a folder; its configuration is {path}/config.yaml")
    is_name = re.fullmatch(r"[\w-]+", str(path)) and not Path(path).is_file()
    if is_name and (folder := _find_presets()) is not None:
        if str(path) not in preset_names():
            raise ConfigError(
                f"{path} is neither a file nor a preset; choose from {', '.join(preset_names())}"
            )
        return (folder / f"{path}.yaml").read_text(encoding="utf-8")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration: {error}") from None


def _to_plain(value: object) -> Any:
    """Python's paths, tuples and sections as YAML would hold them."""
    if isinstance(value, BaseModel):
        return _to_plain(value.model_dump())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _to_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value


def _build_config(
    given: Mapping[parsing.Path, Any], problems: list[str], *, is_record: bool = False
) -> RunConfig:
    canonical = _canonicalize(given)
    problems += canonical.problems
    if not is_record:
        problems += find_redacted(canonical.values)
    tree, unresolved = _build_tree(canonical.values, is_record=is_record)
    problems += unresolved.values()
    config, conflicts, invalid = _validate(tree)
    problems += invalid.values()
    if config is None:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    # A key with a bad value holds its default here: a conflict with it is no news.
    replaced = [*unresolved, *invalid]
    conflicts += find_conflicts(config)
    problems += (line for line in conflicts if not any(key in line for key in replaced))
    if problems:
        problems += find_unsupported_values(config)
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    config = config.with_variables(find_variables(canonical.values.values()))
    remember_config_secrets(config)
    return config.with_ignored_keys(canonical.ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Canonical:
    """The keys that were set, in the spelling used here."""

    values: dict[parsing.Path, Any] = field(default_factory=dict)
    ignored: dict[str, Any] = field(default_factory=dict)
    """Keys without a field, whose values have no effect."""
    problems: list[str] = field(default_factory=list)


def _canonicalize(given: Mapping[parsing.Path, Any]) -> _Canonical:
    result = _Canonical()
    spelled: dict[parsing.Path, str] = {}
    is_old_run = is_old_run_config(frozenset(map(".".join, given)))
    for theirs, raw in given.items():
        path, name = canonical_key(theirs), ".".join(theirs)
        key = ".".join(path)
        value = canonical_value(key, raw)
        twin = next((other for other in spelled if parsing.overlaps(other, path)), None)
        if twin and (twin != path or result.values[twin] != value):
            result.problems.append(
                f"{spelled[twin]}={result.values[twin]!r} and {name}={value!r} "
                "are two spellings of one key; keep one"
            )
        elif key in _keys_without_field():
            _check_key_without_field(key, value, result)
        elif problem := _find_key_problem(path, value, name):
            result.problems.append(problem)
        elif not _means_default(key, value, is_old_run=is_old_run):
            result.values[path], spelled[path] = value, name
    return result


@cache
def _keys_without_field() -> frozenset[str]:
    rules = (*UNSUPPORTED_VALUES, *VALUES_WITHOUT_EFFECT)
    return frozenset({rule.key for rule in rules} - known_keys().keys())


def _check_key_without_field(key: str, value: Any, result: _Canonical) -> None:
    for rule in UNSUPPORTED_VALUES:
        if rule.key == key and value not in rule.supported:
            result.problems.append(f"{key}={value!r} is not supported: {rule.remedy}")
    for rule in VALUES_WITHOUT_EFFECT:
        if rule.key == key and value not in rule.supported:
            result.ignored[key] = value


def _means_default(key: str, value: Any, *, is_old_run: bool) -> bool:
    if is_old_run and key == "trainer.max_prompt_length" and value == 512:
        return True
    known = known_keys()
    may_be_null = key in known_sections() or key in DERIVED or (key in known and known[key].free)
    return value is None and may_be_null


def _find_key_problem(path: parsing.Path, value: Any, name: str) -> str | None:
    key, known = ".".join(path), known_keys()
    if is_free_key(path) or key in known:
        return None
    suggestion = suggest_key(name)
    setting = f"{name}={_mask_secret(name, suggestion, value)}"
    if key in known_sections():
        if value is None or value == {} or (isinstance(value, str) and "${" in value):
            return None
        example = next(child for child in known if child.startswith(f"{key}."))
        return f"{setting}: {name} is a section; set a key in it, such as {example}"
    if remedy := find_unsupported_key(key):
        return f"{setting} is not supported: {remedy}"
    return f"{setting} is unknown; {suggestion}"


def _mask_secret(name: str, suggestion: str, value: Any) -> str:
    """A misspelt api_key must not show its value."""
    names = (name.rsplit(".", 1)[-1], suggestion.rstrip("?").rsplit(".", 1)[-1])
    return "***" if any(map(looks_secret, names)) and isinstance(value, str) else repr(value)


def _build_tree(
    values: Mapping[parsing.Path, Any], *, is_record: bool = False
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values over the defaults with references replaced, and a problem per bad reference.

    A record keeps references to variables that are not set.
    """
    derived = derive_defaults({".".join(path): value for path, value in values.items()})
    defaults = parsing.overlay(
        RunConfig().model_dump(),
        parsing.nest({tuple(key.split(".")): value for key, value in derived.items()}),
    )
    tree = parsing.overlay(defaults, parsing.nest(values))
    resolved: dict[parsing.Path, Any] = {}
    problems: dict[str, str] = {}
    for path, value in parsing.leaves(tree):
        key = ".".join(path)
        try:
            resolved[path] = parsing.resolve(tree, value, (key,))
        except ConfigError as error:
            if is_record and "${oc.env:" in str(value):
                resolved[path] = value
            else:
                problems[key] = str(error)
    return parsing.nest(resolved), problems


def _validate(tree: dict[str, Any]) -> tuple[RunConfig | None, list[str], dict[str, str]]:
    """The configuration, the conflicts inside its sections, and a problem per key with a bad value.

    A bad value is replaced by its default, so that the other problems are found in the same pass.
    """
    invalid: dict[str, str] = {}
    while True:
        conflicts: list[str] = []
        try:
            return RunConfig.model_validate(tree, context=conflicts), conflicts, invalid
        except ValidationError as error:
            found = {_find_key(problem["loc"]) for problem in error.errors()} - invalid.keys()
            keys = [key for key in known_keys() if key in found]
            for key in keys or sorted(found):
                invalid[key] = _describe_invalid_value(key, tree)
            if not keys:
                return None, conflicts, invalid
            for key in keys:
                path = tuple(key.split("."))
                # Null first: a mapping would be merged into the bad value.
                tree = parsing.overlay(tree, parsing.nest({path: None}))
                tree = parsing.overlay(tree, parsing.nest({path: _get_default(key)}))


def _get_default(key: str) -> Any:
    if key in DERIVED:
        return value_at(RunConfig().model_dump(), key)
    return known_keys()[key].default


def _find_key(location: tuple[int | str, ...]) -> str:
    """The key at or above the place where pydantic found an error."""
    parts = tuple(map(str, location))
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    known = [prefix for prefix in prefixes if prefix in known_keys()]
    return known[-1] if known else prefixes[-1]


def _describe_invalid_value(name: str, tree: Mapping[str, Any]) -> str:
    value: Any = tree
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    key = known_keys().get(name)
    if key is None:
        return f"{name}={value!r} does not fit here; see `skyfleet config explain {name}`"
    source = f"; unset, it is {DERIVED[name]}" if name in DERIVED else ""
    # A choice of names says more than their type.
    accepted = key.bounds if key.type == "str" and key.bounds else format_accepted(key)
    return f"{name}={value!r}: it takes {accepted}{source}"
