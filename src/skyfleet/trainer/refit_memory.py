"""Fit a resumed run into memory with the settings that it used before, or say that they change."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyfleet.config.keys import diff
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.models.loading import LoadedModel
from skyfleet.trainer.available_memory import AvailableMemory
from skyfleet.trainer.fit_memory import FittedConfig, fit_training

logger = logging.getLogger(__name__)

FITTED_KEYS = (
    "generator.max_num_seqs",
    "trainer.gradient_checkpointing",
    "trainer.max_tokens_per_microbatch",
)
"""What `fit_training` lowers."""

FittedSettings = Mapping[str, Sequence[Any]]
"""By key: the configured value, and the one that fits."""


def list_fitted_settings(config: RunConfig, fitted: RunConfig) -> dict[str, Sequence[Any]]:
    """What was lowered to fit, for the checkpoint."""
    return {key: list(values) for key, values in diff(config, fitted).items()}


def fit_resumed(
    config: RunConfig,
    settings: FittedSettings,
    *,
    model: LoadedModel | None = None,
    available: AvailableMemory | None = None,
) -> FittedConfig:
    """As `fit_training`, with the `settings` of the checkpoint where they still fit.

    They change numbers by rounding, so that a run with more or less memory than before would differ
    from an uninterrupted one. What is set otherwise than before is the user's choice.
    """
    fitted = fit_training(config, model=model, available=available)
    before = _list_settings_before(config, settings)
    changed = {key: (old, now) for key, old in before.items() if old != (now := _read(fitted, key))}
    if not changed:
        return fitted
    if again := _fit_again(config, before, model=model, available=available):
        return again
    logger.warning(
        "the run used %s before and uses %s now, because it can have less memory; its numbers may "
        "differ by rounding from those of an uninterrupted run",
        ", ".join(f"{key}={_format(old)}" for key, (old, _) in changed.items()),
        ", ".join(f"{key}={_format(now)}" for key, (_, now) in changed.items()),
    )
    return fitted


def _list_settings_before(config: RunConfig, settings: FittedSettings) -> dict[str, Any]:
    """The values that the run used, of the keys that are set as they were."""
    before = {}
    for key in FITTED_KEYS:
        now = _get(config, key)
        configured, used = settings.get(key, (now, now))
        if key not in config.override_keys and configured == now:
            before[key] = used
    return before


def _fit_again(
    config: RunConfig,
    before: Mapping[str, Any],
    *,
    model: LoadedModel | None,
    available: AvailableMemory | None,
) -> FittedConfig | None:
    """The settings of before as if they were overrides; None if they do not fit any more."""
    pinned = config
    for key, value in before.items():
        section, name = key.split(".")
        changed = getattr(pinned, section).model_copy(update={name: value})
        pinned = pinned.model_copy(update={section: changed})
    pinned = pinned.with_override_keys(config.override_keys | before.keys())
    try:
        fitted = fit_training(pinned, model=model, available=available)
    except ConfigError:
        return None
    if fitted.changes or any(_read(fitted, key) != value for key, value in before.items()):
        return None
    changes = (
        f"{key}={_format(value)} instead of {_format(_get(config, key))}, as before"
        for key, value in before.items()
        if value != _get(config, key)
    )
    restored = fitted.config.with_override_keys(config.override_keys)
    return replace(fitted, config=restored, changes=tuple(changes))


def _read(fitted: FittedConfig, key: str) -> Any:
    return _get(fitted.config, key)


def _get(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _format(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
