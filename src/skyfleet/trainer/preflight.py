"""Preflight: everything that can be checked before a model is loaded; needs no torch."""

from __future__ import annotations

from skyfleet.algorithms.registry import build_advantage_estimator
from skyfleet.algorithms.validation import algorithm_errors, algorithm_warnings
from skyfleet.config.root import RunConfig
from skyfleet.config.validation import find_unsupported_values, find_untrainable
from skyfleet.config.warnings import find_warnings
from skyfleet.engines.vllm_controller import check_vllm
from skyfleet.errors import ConfigError
from skyfleet.models.loading import check_model_path
from skyfleet.tracking.tracker import check_trackers


def check_trainable(config: RunConfig) -> None:
    """Raise one ConfigError that lists everything that keeps the configuration from training."""
    problems = [
        *find_unsupported_values(config),
        *find_untrainable(config),
        *algorithm_errors(config),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def find_training_warnings(config: RunConfig) -> list[str]:
    """One sentence per setting that trains, but probably not as intended."""
    return [*find_warnings(config), *algorithm_warnings(config)]


def check_references(config: RunConfig, *, model_is_given: bool = False) -> None:
    """Raise ConfigError or MissingExtraError for a model, tracker, estimator or engine not found."""
    trainer = config.trainer
    if not model_is_given:
        check_model_path(trainer.policy.model.path)
    check_trackers(trainer.logger)
    build_advantage_estimator(trainer.algorithm)
    if config.generator.backend == "vllm" and not config.generator.is_remote:
        check_vllm()
