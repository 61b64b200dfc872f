"""Names: what a configuration names is there; asked before anything takes its time, without torch."""

from __future__ import annotations

from skyfleet.algorithms.advantages import estimator_of
from skyfleet.config.root import RunConfig
from skyfleet.engines.vllm_controller import check_vllm
from skyfleet.models.loading import check_model_path
from skyfleet.tracking.tracker import check_trackers


def check_names(config: RunConfig) -> None:
    trainer = config.trainer
    check_model_path(trainer.policy.model.path)
    check_trackers(trainer.logger)
    estimator_of(trainer.algorithm)
    if config.generator.backend == "vllm" and not config.generator.is_remote:
        check_vllm()
