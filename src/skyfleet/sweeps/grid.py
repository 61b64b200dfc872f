"""Grid: `key=a,b,c`, data sizes and seeds of a sweep -> its variants, or one sentence that says why not."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import yaml

from skyfleet.config.parsing import parse_value
from skyfleet.config.skyrl_compat import canonical_key
from skyfleet.errors import ConfigError

SIZE_KEY = "data.max_train_tasks"
_OWN_KEYS = {
    "trainer.seed": "use --seeds, which counts up from trainer.seed",
    SIZE_KEY: "use --data-sizes",
    "trainer.run_name": "the sweep names its runs; name the sweep with --name",
    "trainer.run_path": "the sweep chooses its folders; name the sweep with --name",
    "trainer.ckpt_path": "every run keeps its checkpoints in its own folder; remove it",
    "trainer.export_path": "every run exports to its own folder; remove it",
    "trainer.resume_mode": "a sweep resumes its runs by itself; remove it",
    "trainer.resume_path": "a sweep resumes its runs by itself; remove it",
}
"""Keys that are not swept, with what to do instead."""
_SETTABLE = frozenset({"trainer.seed", SIZE_KEY})
"""Those of `_OWN_KEYS` that may have one value."""
_OPEN, _CLOSE = "[{(", "]})"
_MAX_SLUG = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A key and its values, as they were written."""

    key: str
    values: tuple[str, ...]

    def find(self, text: str) -> str | None:
        """The value that means the same as the text: `0.001` finds `1e-3`."""
        wanted = _parse(self.key, text)
        return next((value for value in self.values if _parse(self.key, value) == wanted), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One value per swept key, and one data size if sizes are swept."""

    settings: tuple[tuple[str, str], ...] = ()
    data_size: int | None = None

    @property
    def overrides(self) -> list[str]:
        size = [] if self.data_size is None else [f"{SIZE_KEY}={self.data_size}"]
        return [*(f"{key}={value}" for key, value in self.settings), *size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    axes: tuple[Axis, ...] = ()
    data_sizes: tuple[int, ...] = ()
    """Ascending; empty if the sweep has no sizes."""
    overrides: tuple[str, ...] = ()
    """Of every run."""
    n_seeds: int = 1
    baseline: tuple[tuple[str, str], ...] = ()
    """The settings that the others are compared with."""

    @property
    def settings(self) -> list[tuple[tuple[str, str], ...]]:
        """The product of the keys, the baseline first."""
        found = [
            tuple(zip((axis.key for axis in self.axes), values, strict=True))
            for values in product(*(axis.values for axis in self.axes))
        ]
        return sorted(found, key=lambda settings: settings != self.baseline)

    @property
    def variants(self) -> list[Variant]:
        return [
            Variant(settings=settings, data_size=size)
            for settings in self.settings
            for size in self.data_sizes or (None,)
        ]

    def shorten_key(self, key: str) -> str:
        """The last part of a key, `lr`, or the key if two keys end alike."""
        last = key.rpartition(".")[2]
        return key if [a.key.rpartition(".")[2] for a in self.axes].count(last) > 1 else last

    def describe(self, variant: Variant) -> str:
        """`lr=3e-4, 100 tasks`."""
        parts = [f"{self.shorten_key(key)}={value}" for key, value in variant.settings]
        if variant.data_size is not None:
            parts.append(f"{variant.data_size:,} tasks")
        return ", ".join(parts) or "baseline"

    def slug(self, variant: Variant) -> str:
        """A part of a run's name: of letters, digits and `_.-` only, and different for every variant."""
        parts = [f"{self.shorten_key(key)}-{value}" for key, value in variant.settings]
        if variant.data_size is not None:
            parts.append(f"tasks-{variant.data_size}")
        return "-".join(_slug(part) for part in parts)


def build_grid(
    arguments: Sequence[str],
    *,
    n_seeds: int = 1,
    data_sizes: str = "",
    baseline: Sequence[str] = (),
) -> Grid:
    """Arguments with several values, separated by commas outside of quotes and brackets, are swept."""
    axes: list[Axis] = []
    overrides: list[str] = []
    given: set[str] = set()
    for argument in arguments:
        name, equals, text = argument.lstrip("+").partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"{argument!r} is neither a setting nor swept; write key=value or key=a,b"
            )
        key = ".".join(canonical_key(tuple(name.strip().split("."))))
        values = split_values(text)
        _check_key(key, values, given, data_sizes)
        given.add(key)
        if len(values) == 1:
            overrides.append(argument)
        else:
            axes.append(_build_axis(name.strip(), values))
    if n_seeds < 1:
        raise ConfigError(f"--seeds {n_seeds}: a sweep needs at least one seed")
    sizes = _parse_sizes(data_sizes)
    if not axes and len(sizes) < 2 and n_seeds < 2:
        raise ConfigError(
            "the sweep has one run; give a key several values, as in "
            "trainer.policy.optimizer_config.lr=1e-6,3e-6, or use --data-sizes or --seeds"
        )
    return Grid(
        axes=tuple(axes),
        data_sizes=sizes,
        overrides=tuple(overrides),
        n_seeds=n_seeds,
        baseline=_find_baseline(axes, baseline),
    )


def split_values(text: str) -> list[str]:
    """`split_values("[a, b],[c],'d,e'")` is `["[a, b]", "[c]", "'d,e'"]`."""
    return [part.strip() for part in _split(text)]


def _split(text: str) -> Iterator[str]:
    part, depth, quote = "", 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
        elif letter == "," and depth == 0:
            yield part
            part = ""
            continue
        part += letter
    yield part


def _check_key(key: str, values: Sequence[str], given: set[str], data_sizes: str) -> None:
    if key in given:
        raise ConfigError(f"{key} is given twice; write all its values in one argument: {key}=a,b")
    if key == SIZE_KEY and data_sizes:
        raise ConfigError(f"{key}={values[0]} and --data-sizes set the same; remove one")
    if key in _OWN_KEYS and (len(values) > 1 or key not in _SETTABLE):
        raise ConfigError(f"{key}={','.join(values)}: {_OWN_KEYS[key]}")


def _build_axis(key: str, values: Sequence[str]) -> Axis:
    if "" in values:
        raise ConfigError(f"{key}={','.join(values)} has an empty value; remove the extra comma")
    parsed = [_parse(key, value) for value in values]
    for number, value in enumerate(parsed):
        if value in parsed[:number]:
            raise ConfigError(f"{key} has the value {values[number]} twice; remove one")
    return Axis(key=key, values=tuple(values))


def _parse(key: str, text: str) -> object:
    try:
        return parse_value(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}={text!r} is not a YAML value; quote it") from None


def _parse_sizes(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    sizes = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) == 0:
            raise ConfigError(
                f"--data-sizes {text}: {word.strip()!r}; write numbers, as in 100,300"
            )
        sizes.append(int(word))
    for size in sizes:
        if sizes.count(size) > 1:
            raise ConfigError(f"--data-sizes {text} has {size} twice; remove one")
    return tuple(sorted(sizes))


def _find_baseline(axes: Sequence[Axis], given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The first value of every key, unless `--baseline key=value`, or `--baseline value` for one key."""
    chosen = {axis.key: axis.values[0] for axis in axes}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals and len(axes) == 1:
            key, value = axes[0].key, text
        axis = next((axis for axis in axes if axis.key == key.strip()), None)
        if axis is None:
            swept = ", ".join(chosen) or "none"
            raise ConfigError(
                f"--baseline {text}: write key=value of a swept key; these are: {swept}"
            )
        found = axis.find(value)
        if found is None:
            raise ConfigError(
                f"--baseline {text} is not swept; choose from {', '.join(axis.values)}"
            )
        chosen[axis.key] = found
    return tuple(chosen.items())


def _slug(text: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")
    if plain == text and len(plain) <= _MAX_SLUG:
        return plain
    return f"{plain[:_MAX_SLUG]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
