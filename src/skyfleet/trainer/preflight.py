"""Preflight: check that everything the configuration refers to exists; needs no torch."""

from __future__ import annotations

from skyfleet.algorithms.registry import build_advantage_estimator
from skyfleet.algorithms.validation import check_algorithm
from skyfleet.config.root import RunConfig
from skyfleet.engines.vllm_controller import check_vllm
from skyfleet.models.loading import check_model_path
from skyfleet.tracking.tracker import check_trackers


def check_references(config: RunConfig, *, model_is_given: bool = False) -> None:
    """Raise ConfigError or MissingExtraError for a model, tracker, estimator or engine not found."""
    trainer = config.trainer
    if not model_is_given:
        check_model_path(trainer.policy.model.path)
    check_trackers(trainer.logger)
    check_algorithm(config)
    build_advantage_estimator(trainer.algorithm)
    if config.generator.backend == "vllm" and not config.generator.is_remote:
        check_vllm()
