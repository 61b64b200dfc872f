"""Keys: every dotted key with its type, default and meaning; explanations, dumps and differences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from textwrap import indent
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from skyfleet.config.parsing import resolve
from skyfleet.config.redaction import redact_config
from skyfleet.config.root import RunConfig
from skyfleet.config.skyrl_compat import (
    ALIASES,
    UNSUPPORTED_KEYS,
    UNSUPPORTED_VALUES,
    VALUES_WITHOUT_EFFECT,
    UnsupportedValue,
    canonical_key,
    find_unsupported_key,
    other_spellings,
)
from skyfleet.errors import ConfigError

# SkyRL's rules for the value of a key that is not set.
DERIVED: dict[str, str] = {
    "trainer.ref.model.path": "${trainer.policy.model.path}",
    "trainer.algorithm.temperature": "${generator.sampling_params.temperature}",
    "trainer.critic_mini_batch_size": "${trainer.policy_mini_batch_size}",
    "generator.max_input_length": "${trainer.max_prompt_length}",
    "generator.eval_sampling_params.max_generate_length": (
        "${generator.sampling_params.max_generate_length}"
    ),
    "trainer.run_path": "runs/${trainer.run_name}",
    "trainer.ckpt_path": "${trainer.run_path}/checkpoints",
    "trainer.export_path": "${trainer.run_path}/exports",
}


def derive_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that depend on the values that are set."""
    derived: dict[str, Any] = dict(DERIVED)
    if values.get("trainer.max_prompt_length") is None:
        del derived["generator.max_input_length"]  # the field's default holds
    if values.get("generator.batched") is True:
        derived["generator.max_turns"] = 1
    return derived


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    name: str
    type: str
    bounds: str
    default: Any
    """A reference where the default follows another key."""
    meaning: str
    free: bool
    """Whether it holds a mapping whose names the user chooses."""


@cache
def known_keys() -> Mapping[str, Key]:
    return {key.name: key for key in _list_keys(RunConfig, RunConfig(), "")}


@cache
def known_sections() -> frozenset[str]:
    names = (name.split(".") for name in known_keys())
    return frozenset(".".join(name[:end]) for name in names for end in range(1, len(name)))


def is_free_key(path: tuple[str, ...]) -> bool:
    """Whether the path is, or lies below, a mapping whose names the user chooses."""
    parts, known = canonical_key(path), known_keys()
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(known[prefix].free for prefix in prefixes if prefix in known)


def suggest_key(name: str) -> str:
    """How to continue after a key that does not exist."""
    keys = [*known_keys(), *ALIASES]
    sections = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count("."))}
    candidates = [*keys, *sorted(sections)]
    # The right name in the wrong place is a better suggestion than a similar name in the right one.
    misplaced = [key for key in candidates if key.split(".")[-1] == name.split(".")[-1]]
    near = get_close_matches(name, misplaced, n=1, cutoff=0)
    near = near or get_close_matches(name, candidates, n=1)
    return f"did you mean {near[0]}?" if near else "`skyfleet config explain` lists the keys"


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    return reduce(getitem, key.split("."), tree)


def default_at(tree: Mapping[str, Any], key: str) -> Any:
    """The key's value in this tree if it were not set."""
    return resolve(tree, known_keys()[key].default, (key,))


def _list_keys(section: type[BaseModel], defaults: BaseModel | None, prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        default = field.default if defaults is None else getattr(defaults, name)
        child = _get_section(field.annotation)
        if child is None:
            yield _make_key(prefix + name, field, default)
        else:
            yield from _list_keys(child, default, f"{prefix}{name}.")


def _get_section(annotation: Any) -> type[BaseModel] | None:
    for kind in get_args(annotation) or (annotation,):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _make_key(name: str, field: FieldInfo, default: Any) -> Key:
    type_ = _format_type(field.annotation)
    return Key(
        name=name,
        type=type_,
        bounds=", ".join(filter(None, map(_format_bound, field.metadata))),
        default=DERIVED.get(name, default),
        meaning=" ".join((field.description or "").split()),
        free="dict" in type_,
    )


def _format_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _format_type(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " | ".join(map(_format_type, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_format_type, arguments))}]"
    if annotation is NoneType:
        return "null"
    return "any" if annotation is Any else str(annotation.__name__)


def _format_bound(rule: Any) -> str:
    match rule:
        case Ge(ge=bound):
            return f"at least {bound}"
        case Gt(gt=bound):
            return f"above {bound}"
        case Le(le=bound):
            return f"at most {bound}"
        case Lt(lt=bound):
            return f"below {bound}"
        case MinLen():
            return "not empty"
        case AfterValidator(func=func):
            return func.__doc__ or ""
    return ""


_PAGE_HEAD = """# Keys

```
skyfleet config explain trainer.algorithm      # the keys of a section, with their meaning
skyfleet config show my_run.yaml trainer.seed=7  # every key with its value, and warnings
```

`skyfleet.config.keys.write_keys_page` writes this page from the code; do not edit it.

A configuration is a YAML file, `key=value` overrides on the command line, or both. Names are SkyRL's in
Fleet's flat spelling; the other spelling of a key works too, and so do Hydra's `+key=value` and
`++key=value`. `${a.b}` takes the value of another key, `${oc.env:NAME,default}` that of an environment
variable.

A later override replaces an earlier one. A mapping adds to a section and replaces a key:
`data.val_data={mine: [tasks.jsonl]}` evaluates on `mine` only, whatever sets the file names, and
`data.val_data.mine=[tasks.jsonl]` adds that set to them. Nothing can be added to a list.

Loading reports everything that is wrong at once, one line per key. A run, `--dry-run` and
`skyfleet config show` warn about a key that is set and has no effect.
"""


def explain(key: str = "") -> str:
    """A key's type, default, bounds and meaning, or all keys of a section; "" lists every key."""
    name = ".".join(canonical_key(tuple(key.split("."))))
    known = known_keys()
    if name in known:
        return _explain_key(known[name])
    if below := [known[child] for child in known if not name or child.startswith(f"{name}.")]:
        return "\n".join(map(_format_with_meaning, below))
    if rule := next((rule for rule in UNSUPPORTED_VALUES if rule.key == name), None):
        return f"{key} runs with {_format_supported(rule)}; otherwise: {rule.remedy}"
    if rule := next((rule for rule in VALUES_WITHOUT_EFFECT if rule.key == name), None):
        return f"{key} has no effect: {rule.remedy}"
    if remedy := find_unsupported_key(name):
        return f"{key} is not supported: {remedy}"
    raise ConfigError(f"{key} is unknown; {suggest_key(key)}")


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every key with its plain value; secrets are redacted."""
    return dict(_flatten(redact_config(config), ""))


def diff(a: RunConfig, b: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, with both values."""
    one, other = flatten(a), flatten(b)
    pairs = {key: (one.get(key), other.get(key)) for key in (one | other)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def dump_yaml(config: RunConfig, *, without: Iterable[str] = ()) -> str:
    """YAML that loads as the same configuration, except for secrets; see `config.redaction`.

    `without` are keys to leave out, such as `trainer.run_path`.
    """
    values = redact_config(config)
    for key in without:
        section, _, name = key.partition(".")
        values[section].pop(name)
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


def keys_page() -> str:
    """docs/skyrl_keys.md."""
    parts = [_PAGE_HEAD]
    for section in RunConfig.model_fields:
        rows = (
            _format_row(key) for name, key in known_keys().items() if name.startswith(f"{section}.")
        )
        parts.append(
            f"## {section}\n\n{_format_table(('key', 'takes', 'default', 'meaning'), rows)}"
        )
    parts.append(
        "## Values that are not supported\n\n"
        "A run with another value would give other results, so it is refused.\n\n"
        + _format_table(("key", "runs with", "otherwise"), map(_format_rule, UNSUPPORTED_VALUES))
    )
    parts.append(
        "## Values without effect\n\n"
        "A run with another value gives the same results, and starts with a warning.\n\n"
        + _format_table(("key", "no warning with", "why"), map(_format_rule, VALUES_WITHOUT_EFFECT))
    )
    unsupported = ((f"`{pattern}`", remedy) for pattern, remedy in UNSUPPORTED_KEYS.items())
    parts.append(
        "## Keys of SkyRL that are not supported\n\n"
        "A key stands for every key below it.\n\n"
        + _format_table(("key", "what to do"), unsupported)
    )
    return "\n".join(parts)


def write_keys_page(path: Path) -> None:
    path.write_text(keys_page(), encoding="utf-8")


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict) and key not in known_keys():
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _format_key(key: Key) -> str:
    return f"{key.name}: {format_accepted(key)} = {_format_value(key.default)}"


def _format_with_meaning(key: Key) -> str:
    return "\n".join(filter(None, (_format_key(key), indent(key.meaning, "    "))))


def _explain_key(key: Key) -> str:
    others = other_spellings(key.name)
    refused = next((rule for rule in UNSUPPORTED_VALUES if rule.key == key.name), None)
    ignored = next((rule for rule in VALUES_WITHOUT_EFFECT if rule.key == key.name), None)
    lines = (
        _format_key(key),
        key.meaning,
        f"Also spelled {', '.join(others)}." if others else "",
        f"Runs with {_format_supported(refused)}; otherwise: {refused.remedy}." if refused else "",
        f"No effect unless {_format_supported(ignored)}: {ignored.remedy}." if ignored else "",
    )
    return "\n".join(filter(None, lines))


def _format_row(key: Key) -> tuple[str, str, str, str]:
    others = "".join(f" Also `{other}`." for other in other_spellings(key.name))
    default = f"`{_format_value(key.default)}`"
    return f"`{key.name}`", format_accepted(key), default, (key.meaning + others).strip()


def _format_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def format_accepted(key: Key) -> str:
    return f"{key.type}, {key.bounds}" if key.bounds else key.type


def _format_rule(rule: UnsupportedValue) -> tuple[str, str, str]:
    return f"`{rule.key}`", _format_supported(rule), rule.remedy


def _format_supported(rule: UnsupportedValue) -> str:
    known = known_keys()
    default = (known[rule.key].default,) if rule.key in known else ()
    values = map(_format_value, rule.supported or default)
    anything = [f"any value with generator.backend={backend}" for backend in rule.backends]
    anything += [f"any value with trainer.strategy={name}" for name in rule.strategies]
    anything += ["any value with trainer.placement.use_ray=true"] * rule.with_ray
    return ", ".join([*values, *anything])


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
