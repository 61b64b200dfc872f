"""A run configuration from Python values: defaults, a base, arguments, then keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyfleet.config.keys import dump_yaml
from skyfleet.config.loading import load_config
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.presets import find_preset, list_presets

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
    """`config=` taken apart: a YAML text to start from, and keys that win over arguments."""

    base: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)

    def build(self, arguments: Mapping[str, Any]) -> RunConfig:
        """The configuration; a key of `config=` wins over an argument for the same key."""
        keys = {**arguments, **self.keys}
        if self.base is not None:
            return build_config(self.base, keys)
        is_tiny = keys.get("trainer.policy.model.path") == "tiny"
        defaults = {**API_DEFAULTS, **(TINY_DEFAULTS if is_tiny else {})}
        return build_config("", {**defaults, **keys}).with_override_keys(keys)


def build_config(text: str, keys: Mapping[str, Any]) -> RunConfig:
    """YAML text and dotted keys to a checked configuration."""
    # The one place that will call config's config_from_python.
    return load_config(text, [f"{key}={_write(key, value)}" for key, value in keys.items()])


def read_config(given: ConfigLike) -> GivenConfig:
    """Keys, a YAML path, a preset, a run folder, a RunConfig, or a list of these."""
    if given is None:
        return GivenConfig()
    if isinstance(given, RunConfig):
        return GivenConfig(base=dump_yaml(given))
    if isinstance(given, Mapping):
        return GivenConfig(keys=dict(given))
    if isinstance(given, str | Path):
        return GivenConfig(base=_read_base(given))
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


def _read_base(given: str | Path) -> str:
    path = Path(given)
    path = path / "config.yaml" if (path / "config.yaml").is_file() else path
    if path.is_file():
        return path.read_text(encoding="utf-8")
    preset = find_preset(str(given))
    if preset is None:
        names = ", ".join(preset.name for preset in list_presets())
        raise ConfigError(f"config={str(given)!r}: no such file, and the presets are {names}")
    return preset.text


def _write(key: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        raise ConfigError(f"config: {key}={value!r:.80} is not a plain value") from None
