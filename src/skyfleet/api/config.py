"""A run configuration from Python values: defaults, a base, arguments, then keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyfleet.config.keys import known_sections
from skyfleet.config.loading import config_from_python
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError

ConfigLike = RunConfig | Mapping[str, Any] | str | Path | Sequence[Any] | None

API_DEFAULTS: Mapping[str, Any] = {
    "trainer.max_prompt_length": 2048,
    "trainer.max_tokens_per_microbatch": 8192,
}
"""Where no YAML file or preset is the base: room for real prompts, and packed micro-batches."""

TINY_DEFAULTS: Mapping[str, Any] = {
    "trainer.policy.model_config_kwargs": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "initializer_range": 0.08,
        "vocab_size": 1536,
    },
    "trainer.policy.optimizer_config.lr": 3e-4,
    "generator.sampling_params.max_generate_length": 64,
}
"""For the model "tiny", without a base: the sizes of the preset tiny."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenConfig:
    """`config=` taken apart: a base to start from, and keys that win over arguments."""

    base: RunConfig | Path | str | None = None
    """A configuration, a YAML file, or the name of a preset."""
    keys: Mapping[str, Any] = field(default_factory=dict)

    def load_base(self) -> RunConfig:
        """The base without keys and arguments."""
        return config_from_python(self.base, {})

    def build(self, arguments: Mapping[str, Any]) -> RunConfig:
        """The configuration; a key of `config=` wins over an argument for the same key."""
        keys = {**arguments, **self.keys}
        if self.base is not None:
            return config_from_python(self.base, keys)
        is_tiny = keys.get("trainer.policy.model.path") == "tiny"
        defaults = {**API_DEFAULTS, **(TINY_DEFAULTS if is_tiny else {})}
        return config_from_python(None, {**defaults, **keys}).with_override_keys(keys)


def read_config(given: ConfigLike) -> GivenConfig:
    """Keys, a YAML path, a preset, a run folder, a RunConfig, or a list of these."""
    if given is None:
        return GivenConfig()
    if isinstance(given, RunConfig):
        return GivenConfig(base=given)
    if isinstance(given, Mapping):
        return GivenConfig(keys=dict(_flatten(given)))
    if isinstance(given, str | Path):
        saved = Path(given) / "config.yaml"
        return GivenConfig(base=saved if saved.is_file() else given)
    if isinstance(given, Sequence):
        parts = [read_config(part) for part in given]
        bases = [part.base for part in parts if part.base is not None]
        if len(bases) > 1:
            raise ConfigError("config= has two bases; pass one YAML file or preset, and keys")
        keys = {key: value for part in parts for key, value in part.keys.items()}
        return GivenConfig(base=bases[0] if bases else None, keys=keys)
    raise ConfigError(
        f"config={given!r:.80}: pass a dict of keys, a YAML path, a preset, or a list of these"
    )


def _flatten(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys, also of nested sections: {"trainer": {"seed": 1}} is {"trainer.seed": 1}."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in known_sections():
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value
