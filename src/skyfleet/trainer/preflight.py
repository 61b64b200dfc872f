"""Preflight: everything that can be checked before a model is loaded; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from skyfleet.algorithms.registry import build_advantage_estimator
from skyfleet.algorithms.validation import algorithm_errors, algorithm_warnings
from skyfleet.config.root import RunConfig
from skyfleet.config.validation import find_unsupported_values, find_untrainable
from skyfleet.config.warnings import find_warnings
from skyfleet.engines.vllm_controller import check_vllm
from skyfleet.errors import ConfigError
from skyfleet.models.loading import check_model_config
from skyfleet.tracking.tracker import check_trackers
from skyfleet.tracking.wandb_tracker import check_login
from skyfleet.trainer.alerting import check_watching


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
    for check in reference_checks(config, model_is_given=model_is_given):
        check()


def reference_checks(
    config: RunConfig, *, model_is_given: bool = False
) -> Iterator[Callable[[], object]]:
    """One check per thing that the configuration names; each raises if it is not found."""
    trainer = config.trainer
    if not model_is_given:
        model = trainer.policy.model
        yield partial(check_model_config, model.path, trust_remote_code=model.trust_remote_code)
    yield partial(check_trackers, trainer.logger)
    if "wandb" in trainer.logger:
        yield partial(check_login, trainer.wandb)
    yield partial(check_watching, trainer)
    yield partial(build_advantage_estimator, trainer.algorithm)
    if config.generator.backend == "vllm" and not config.generator.is_remote:
        yield check_vllm
