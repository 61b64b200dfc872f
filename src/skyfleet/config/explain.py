"""Explain: what a key means, what a configuration holds, and how two differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from skyfleet.config.aliases import canonical_key, other_spellings
from skyfleet.config.keys import Key, known_keys
from skyfleet.config.loading import nearest
from skyfleet.config.root import RunConfig
from skyfleet.config.unsupported_keys import REFUSED, refusal
from skyfleet.config.unsupported_values import GAPS, Gap
from skyfleet.errors import ConfigError

_PAGE_HEAD = """# Keys

Written from the field docstrings by `skyfleet.config.explain.write_keys_page`; do not edit.
A run is `key=value` on the command line or the same tree in YAML. Names are SkyRL's in Fleet's flat
spelling; the other spelling of a key is read too. `${…}` follows another key.

A later `key=value` wins over one in the same spelling. One whose value is a mapping adds to a section
and replaces a key: `data.val_data={mine: [tasks.jsonl]}` evaluates on `mine` alone, whatever sets the
file names, and `data.val_data.mine=[tasks.jsonl]` adds that set to them; to a list, whose sets have no
names, nothing can be added.

A key that was set and that nothing reads, because another key switches off what would, is named as a
run starts and by `skyfleet config show`.
"""


def explain(key: str = "") -> str:
    """A key's type, default, bounds and meaning; all of a section's keys; "" lists every one."""
    name = ".".join(canonical_key(tuple(key.split("."))))
    known = known_keys()
    if name in known:
        return _paragraph(known[name])
    if below := [known[child] for child in known if not name or child.startswith(f"{name}.")]:
        return "\n".join(map(_line_with_meaning, below))
    if reason := refusal(name):
        return f"{key} is not supported: {reason}"
    raise ConfigError(f"{key} is unknown; {nearest(key)}")


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every key with its plain value; secrets are masked."""
    return dict(_flat(config.model_dump(mode="json"), ""))


def diff(a: RunConfig, b: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, with both values."""
    one, other = flatten(a), flatten(b)
    pairs = {key: (one.get(key), other.get(key)) for key in (one | other)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def as_yaml(config: RunConfig) -> str:
    """Text that loads as the same configuration, but for its secrets."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def keys_page() -> str:
    """docs/skyrl_keys.md."""
    parts = [_PAGE_HEAD]
    for section in RunConfig.model_fields:
        rows = (_row(key) for name, key in known_keys().items() if name.startswith(f"{section}."))
        parts.append(f"## {section}\n\n{_table(('key', 'takes', 'default', 'meaning'), rows)}")
    gaps = ((f"`{gap.key}`", _works(gap), gap.instead) for gap in GAPS)
    parts.append(
        "## Values that do not run yet\n\n"
        "They load, so that a recipe can be shown and compared; starting a run refuses them.\n\n"
        + _table(("key", "runs with", "otherwise"), gaps)
    )
    refused = ((f"`{pattern}`", reason) for pattern, reason in REFUSED.items())
    parts.append(
        "## Keys of SkyRL that are refused\n\n"
        "A key stands for everything below it.\n\n"
        + _table(("key", "why, and what to do"), refused)
    )
    return "\n".join(parts)


def write_keys_page(path: Path) -> None:
    path.write_text(keys_page(), encoding="utf-8")


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict) and key not in known_keys():
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _line(key: Key) -> str:
    return f"{key.name}: {_takes(key)} = {_written(key.default)}"


def _line_with_meaning(key: Key) -> str:
    return "\n".join(filter(None, (_line(key), indent(key.meaning, "    "))))


def _paragraph(key: Key) -> str:
    others = other_spellings(key.name)
    gap = next((gap for gap in GAPS if gap.key == key.name), None)
    lines = (
        _line(key),
        key.meaning,
        f"Also spelled {', '.join(others)}." if others else "",
        f"Runs with {_works(gap)}; otherwise: {gap.instead}." if gap else "",
    )
    return "\n".join(filter(None, lines))


def _row(key: Key) -> tuple[str, str, str, str]:
    others = "".join(f" Also `{other}`." for other in other_spellings(key.name))
    default = f"`{_written(key.default)}`"
    return f"`{key.name}`", _takes(key), default, (key.meaning + others).strip()


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _takes(key: Key) -> str:
    return f"{key.type}, {key.bounds}" if key.bounds else key.type


def _works(gap: Gap) -> str:
    values = gap.works or (known_keys()[gap.key].default,)
    anything = [f"anything with generator.backend={backend}" for backend in gap.backends]
    return ", ".join([*map(_written, values), *anything])


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
